"""Expressions from files are compiled and matched within limits."""

import re
import threading
import time

import pytest

from mmvllm import patterns as patterns_module
from mmvllm.patterns import MAX_SIZE, Matching, PatternError, compiled

NAME = "model.language_model.layers.10.self_attn.q_proj"
SLOW = r"(?:\w|\w\w|.)*\d"  # takes longer than anybody waits


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(?:q_proj|k_proj)",
        r"^(?!.*(?:visual|merger)).*(?:q_proj|o_proj).*",  # LLaMA-Factory
        r"^(model\.language_model(?=\.).*\.(q_proj|o_proj))$",  # ms-swift
        r".*layers\.\d{1,2}\.self_attn\..*",
        r"model\.visual.*",
        "",
    ],
)
def test_matches_are_those_of_python(pattern):
    for name in (NAME, NAME.replace("language_model", "visual"), "lm_head"):
        assert Matching(5.0).is_match(compiled(pattern), name) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize("pattern", [r"(([a-z_.0-9])+)+X", r"(.*)*\d", r"(?:(a)|a|aa)*b"])
def test_some_that_python_never_ends_are_quick(pattern):
    assert not Matching(5.0).is_match(compiled(pattern), NAME)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "is not valid: missing )"),
        ("(" * 5000 + "a" + ")" * 5000, "is not valid: maximum recursion depth"),
        ("a{1000000000}", "has, with its repetitions"),
        ("a{3,1000000000}", "has, with its repetitions"),
        ("((a{1000}){1000}){1000}", "has, with its repetitions"),
        (f"a{{{'9' * 5000}}}", "has, with its repetitions"),
        ("a" * (MAX_SIZE + 1), "has, with its repetitions, 1000001 characters"),
    ],
)
def test_expressions_that_are_not_valid_or_too_large_are_refused_at_once(pattern, reason):
    begin = time.monotonic()
    with pytest.raises(PatternError, match=re.escape(reason)) as raised:
        compiled(pattern)
    assert time.monotonic() - begin < 5 and len(str(raised.value)) < 400


def test_a_match_that_takes_too_long_ends_and_others_go_on_meanwhile(monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.2)
    ticks, is_over = [], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(PatternError, match=re.escape(f"the expression {SLOW!r} takes too long to match '{NAME}'")):
        Matching(5.0).is_match(compiled(SLOW), NAME)
    end = time.monotonic()
    is_over.set()
    thread.join()
    assert len([at for at in ticks if begin < at < end]) > 5  # the interpreter's lock is free


def test_all_matches_of_a_file_share_their_time(monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.1)
    matching, begin = Matching(0.15), time.monotonic()
    for _ in range(20):
        with pytest.raises(PatternError):
            matching.is_match(compiled(SLOW), NAME)
    assert time.monotonic() - begin < 1.5  # not 2
