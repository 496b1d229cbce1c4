"""Invalid values are refused with the value and the range; valid ones are kept as plain Python values."""

import itertools
import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.errors import RequestError

NOT_NUMBERS = [math.nan, math.inf, -math.inf, None, "1", True, [1.0], 1j, 10**400]
NOT_NUMBERS += [np.bool_(True), np.float32("nan"), np.float32("inf")]
NUMBERS = {  # name: (range as the message says it, values outside, values inside)
    "temperature": ("of at least 0", [-1, -1e-9, np.float64(-1)], [0, 0.0, 0.7, 2, 1e-3, 100.0]),
    "top_p": (r"in \(0, 1\]", [0, -0.1, 1.0001, 2], [1, 1.0, 0.5, 1e-3, Fraction(1, 4)]),
    "min_p": (r"in \[0, 1\]", [-0.1, 1.0001, 2], [0, 1, 0.05]),
    "repetition_penalty": ("above 0", [0, -1.0], [1, 1.05, 0.5, 20]),
    "presence_penalty": (r"in \[-2, 2\]", [-2.01, 2.01, 3], [-2, 2, 0, 0.5]),
    "frequency_penalty": (r"in \[-2, 2\]", [-2.01, 2.01, 3], [-2, 2, 0, 0.5]),
}
NOT_INTEGERS = [1.0, 1.5, "1", True, [1], math.nan, math.inf, np.float64(1), np.bool_(True)]
INTEGERS = {
    "top_k": ("of at least -1", [-2, -100, None], [0, 1, 10**6]),
    "max_tokens": ("of at least 1, -1 or None", [0, -2], [1, 4096]),
    "min_tokens": (r"in \[0, max_tokens=256\]", [-1, 257, None], [0, 1, 256]),
    "n": (r"in \[1, 16384\]", [0, -1, None, 16_385, 10**30], [1, 4, 16_384]),
    "logprobs": (r"in \[0, 20\] or None", [-1, 21], [0, 1, 20]),
    "prompt_logprobs": (r"in \[0, 20\] or None", [-1, 21], [0, 1, 20]),
    "seed": ("or None", [], [0, -1, 2**64, 7]),
}


def cases(table: dict, extra: list, which: int) -> list:
    return [
        pytest.param(name, row[0], value, id=f"{name}={value!r:.20}")
        for name, row in table.items()
        for value in [*row[which], *extra]
    ]


@pytest.mark.parametrize(("name", "wanted", "value"), cases(NUMBERS, NOT_NUMBERS, 1))
def test_an_invalid_number_is_refused(name, wanted, value):
    with pytest.raises(ValueError, match=f"^{name} must be a number {wanted}, got .*$") as error:
        SamplingParams(**{name: value})
    assert repr(value)[:200] in str(error.value)


@pytest.mark.parametrize(("name", "wanted", "value"), cases(INTEGERS, NOT_INTEGERS, 1))
def test_an_invalid_integer_is_refused(name, wanted, value):
    with pytest.raises(ValueError, match=f"^{name} must be an integer {wanted}, got .*$") as error:
        SamplingParams(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("name", "wanted", "value"), cases(NUMBERS, [], 2))
def test_valid_numbers_are_kept(name, wanted, value):
    for given in (value, np.float64(value), np.float32(value)):
        kept = getattr(SamplingParams(**{name: given}), name)
        assert type(kept) is float and kept == given


@pytest.mark.parametrize(("name", "wanted", "value"), cases(INTEGERS, [], 2))
def test_valid_integers_are_kept(name, wanted, value):
    for given in (value, np.int64(value)) if abs(value) < 2**63 else (value,):
        kept = getattr(SamplingParams(**{name: given}), name)
        assert type(kept) is int and kept == value


def test_defaults_are_greedy_and_valid():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.n, params.seed, params.logprobs) == (0.0, 256, 1, None, None)
    assert params == SamplingParams(seed=None, logprobs=None)


def test_nothing_need_be_generated_where_log_probabilities_of_the_prompt_are_wanted():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(ValueError, match=r"max_tokens must be an integer of at least 0.*, got -2"):
        SamplingParams(max_tokens=-2, prompt_logprobs=0)


@pytest.mark.parametrize("given", [None, -1, np.int64(-1)])
def test_a_completion_without_a_limit_may_fill_the_context(given, shared_llm):
    [output] = shared_llm.generate("Hi", SamplingParams(max_tokens=given, ignore_eos=True))
    assert output.finish_reason == "length"
    assert output.num_prompt_tokens + len(output.token_ids) == shared_llm.engine.max_model_len


def test_the_least_length_of_a_completion_without_a_limit_has_no_upper_bound():
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(ValueError, match="min_tokens must be an integer of at least 0, got -1"):
        SamplingParams(max_tokens=None, min_tokens=-1)


def test_two_ways_to_keep_all_tokens_are_the_same():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) and SamplingParams(top_k=-1, beam_width=2).top_k == 0


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ValueError, match=r"min_tokens must be an integer in \[0, max_tokens=5\], got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        ("END", ("END",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ((text for text in ["x", "y"]), ("x", "y")),
        (None, ()),
        ([], ()),
        ("\n", ("\n",)),
    ],
)
def test_stop_strings_become_a_tuple(stop, want):
    assert SamplingParams(stop=stop).stop == want


@pytest.mark.parametrize("word", ["", 5, "a\ud800"])
def test_bad_words_that_no_tokenizer_takes_are_refused(word):
    with pytest.raises(ValueError, match=r"^bad_words must be strings that are not empty.*, got ") as caught:
        SamplingParams(bad_words=["a", word])
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("stop", "shown"), [("", "''"), (["a", ""], "''"), ([1], "1"), (5, "5"), ([None], "None"), (b"a", "97"), (0, "0")]
)
def test_invalid_stop_strings_are_refused(stop, shown):
    with pytest.raises(ValueError) as error:
        SamplingParams(stop=stop)
    assert str(error.value) == f"stop must be strings that are not empty, got {shown}"


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([3, 4], (3, 4)),
        (7, (7,)),
        (0, (0,)),
        (None, ()),
        ((), ()),
        ({9}, (9,)),
        (np.array([1, 2]), (1, 2)),
        (np.int64(5), (5,)),
    ],
    ids=str,
)
def test_stop_token_ids_become_a_tuple_of_integers(ids, want):
    got = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert got == want and all(type(token_id) is int for token_id in got)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [([1, -1], "-1"), ([1.0], "1.0"), (["5"], "'5'"), ("5", "'5'"), ([True], "True"), ([[1]], r"\[1\]"), (2.5, "2.5")],
)
def test_invalid_stop_token_ids_are_refused(ids, shown):
    with pytest.raises(ValueError, match=f"^stop_token_ids must be integers of at least 0, got {shown}$"):
        SamplingParams(stop_token_ids=ids)


@pytest.mark.parametrize("value", [True, False, np.bool_(True), np.bool_(False)])
def test_ignore_eos_is_a_bool(value):
    kept = SamplingParams(ignore_eos=value).ignore_eos
    assert type(kept) is bool and kept == value


@pytest.mark.parametrize("value", ["yes", None, 2, [True], math.nan])
def test_an_invalid_ignore_eos_is_refused(value):
    with pytest.raises(ValueError, match=r"ignore_eos must be True or False, got .*"):
        SamplingParams(ignore_eos=value)


def test_equal_params_have_equal_hashes_in_every_notation():
    lists = SamplingParams(stop=["a"], stop_token_ids=[1], temperature=1, top_k=np.int64(3))
    tuples = SamplingParams(stop="a", stop_token_ids=(1,), temperature=1.0, top_k=3)
    assert lists == tuples and hash(lists) == hash(tuples)


def test_arguments_are_keyword_only_and_validated():
    with pytest.raises(TypeError):
        SamplingParams(0.5)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]
# Values without a representation, or without a truth value.
ODD = {"digits": 10**5000, "nested": NESTED, "array": np.zeros((2, 2)), "none": np.zeros(0), "tensor": torch.zeros(3)}


@pytest.mark.parametrize("name", [own.name for own in fields(SamplingParams)])
@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_value_that_python_cannot_write_or_compare_is_refused_in_a_sentence(name, value):
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert error.param == name and len(str(error)) < 1000
    else:  # an empty array is an empty list, and integers have any size
        assert len(getattr(params, name)) == 0 if value is ODD["none"] else value == ODD["digits"]


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"])
@pytest.mark.parametrize("value", [range(10**12), itertools.count(), itertools.repeat("a"), itertools.repeat(print)])
def test_an_endless_list_is_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} has "):
        SamplingParams(**{name: value})
