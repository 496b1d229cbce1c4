"""Expressions from files are compiled and matched within limits."""

import re
import signal
import threading
import time
from contextlib import nullcontext, suppress

import pytest

from mmvllm.utils import patterns as patterns_module
from mmvllm.utils.patterns import MAX_SIZE, Matching, PatternError, check_repeats_no_choice, compiled
from tests.helpers.media.hostile import SLOW_EXPRESSION as SLOW

NAME = "model.language_model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(?:q_proj|k_proj)",
        r"^(?!.*(?:visual|merger)).*(?:q_proj|o_proj).*",  # LLaMA-Factory
        r"^(model\.language_model(?=\.).*\.(q_proj|o_proj))$",  # ms-swift
        r".*layers\.\d{1,2}\.self_attn\..*",
        "|".join([r"layers\.0\.[a-z]{1,9}"] * 20),
        r"model\.visual.*",
        r"model.*\(?Right\)?",
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
        (f"a{{{'0' * 20}{'9' * 20}}}", "has, with its repetitions"),
        ("((a{000000000000500}){000000000000500}){000000000000500}", "has, with its repetitions"),
        ("(?x)((a{ 500 }) { 500 }){ 500}", "has, with its repetitions"),
        ("(?au)a", "is not valid: "),
        ("(?:a|aa)(?R)|b", "calls itself or one of its groups"),
        ("((?1))", "calls itself or one of its groups"),
        ("(?P<a>b(?&a)?)", "calls itself or one of its groups"),
        ("(?P<a>b(?P>a)?)", "calls itself or one of its groups"),
        ("a" * (MAX_SIZE + 1), "has, with its repetitions, 1000001 characters"),
    ],
)
def test_expressions_that_are_not_valid_or_too_large_are_refused_at_once(pattern, reason):
    begin = time.thread_time()
    with pytest.raises(PatternError, match=re.escape(reason)) as raised:
        compiled(pattern)
    assert time.thread_time() - begin < 5 and len(str(raised.value)) < 400


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (QWEN, None),
        (r"[\p{Lu}\p{Lt}]*[\p{Ll}]+(?i:'s|'t)?|\p{N}{1,3}", None),
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", None),
        (r"\)+|[(*){]+|(a+)?|\(a+\)*|(?:ab)+", None),
        ("(a+)+$", "repeats a group with choices"),
        ("(?:a|aa)*c", "repeats a group with choices"),
        ("((a+)b)+", "repeats a group with choices"),
        ("(?:(?:a?)){9}", "repeats a group with choices"),
        ("(?<name>a{1,2})*", "repeats a group with choices"),
        ("))(a*)*", "repeats a group with choices"),
    ],
)
def test_what_an_engine_without_a_limit_may_match_repeats_no_choice(pattern, reason):
    with nullcontext() if reason is None else pytest.raises(PatternError, match=reason):
        check_repeats_no_choice(pattern)


def test_a_match_that_takes_too_long_ends(monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.1)
    message = f"the expression {SLOW!r} takes too long to match '{NAME}'; simplify it"
    with pytest.raises(PatternError, match=re.escape(message)):
        Matching(5.0).is_match(compiled(SLOW), NAME)


def test_other_threads_go_on_during_a_match(monkeypatch):
    class Interrupted(Exception):
        """Raised in the match by another thread, which needs the interpreter's lock for it."""

    def interrupt(*_) -> None:
        raise Interrupted

    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 30.0)
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    pattern, begin = compiled(SLOW), time.thread_time()
    try:
        with pytest.raises(Interrupted):
            timer.start()
            Matching(30.0).is_match(pattern, NAME)
        assert time.thread_time() - begin < 15  # before its end
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "pattern",
    [r"(?:\w\w?|.)" * 24 + r"\d\d\d", ".?" * 60 + "." * 40 + r"\d\d", r".*" * 20 + r"\d[A-Z]", SLOW],
)
def test_expressions_without_a_repeated_group_are_limited_too(pattern, monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.1)
    begin = time.thread_time()
    with suppress(PatternError):
        assert not Matching(0.1).is_match(compiled(pattern), NAME)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"(.*)(.*)(.*)(.*)(.*)\1\2\3[cd]", "a" * 90),
        (r"(?P<a>.*)(.*)(.*)(.*)(?P=a)[cd]", "a" * 300),
        (r".*.*.*.*.*[cd]", "a" * 20_000),
    ],
)
def test_references_and_long_names_are_matched_within_a_limit(pattern, name, monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.05)
    with pytest.raises(PatternError, match="takes too long to match"):
        Matching(5.0).is_match(compiled(pattern), name)


def test_all_matches_of_a_file_share_their_time(monkeypatch):
    monkeypatch.setattr(patterns_module, "MATCH_SECONDS", 0.1)
    matching, begin = Matching(0.15), time.thread_time()
    for _ in range(20):
        with pytest.raises(PatternError):
            matching.is_match(compiled(SLOW), NAME)
    with pytest.raises(PatternError):
        matching.is_match(compiled(r"(?:\w)*"), NAME)
    assert time.thread_time() - begin < 1.5  # not 2


def test_many_quick_expressions_have_a_limit_too():
    matching, few = Matching(0.05), 0
    with pytest.raises(PatternError, match=r"the expression '.*' exceeds the time limit of its file"):
        for few in range(10**6):
            assert not matching.is_match(matching.compiled(f"visual.*{few}"), NAME)
    assert 0 < few < 10**5
