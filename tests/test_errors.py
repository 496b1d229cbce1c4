"""The texts of errors, and their facts on the way from another process."""

import pickle

import pytest

from mmvllm.errors import ArgumentError, EngineBusy, ImageError, ParameterError, PromptTooLong, RequestsAborted
from mmvllm.utils.text import counted, listed

ERRORS = [
    ParameterError("top_p", 2, "in (0, 1]"),
    ImageError("cat.png", "no such file"),
    PromptTooLong("too long", "shorten it", value=9, limit=8),
    ArgumentError("{given} is not {value}", value="x"),
    EngineBusy(9, 8),
    RequestsAborted("request 1: aborted", [None, 2]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled(error):
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is type(error) and str(restored) == str(error) and restored.__dict__ == error.__dict__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1 request is being served or waiting; try again later"),
        (2, "2 requests are being served or waiting; try again later"),
    ],
)
def test_a_busy_engine_says_how_many_requests_it_has(value, text):
    error = EngineBusy(value, 4)
    assert (str(error), error.value, error.limit) == (text, value, 4)


def test_numbers_and_choices_in_messages():
    assert [counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [listed("abc"[:number]) for number in (1, 2, 3)] == ["'a'", "'a' or 'b'", "'a', 'b' or 'c'"]
    assert listed("ab", "and") == "'a' and 'b'"
