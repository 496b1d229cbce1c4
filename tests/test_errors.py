"""Errors keep their text and facts on the way from another process."""

import pickle

import pytest

from mmvllm.errors import ArgumentError, EngineBusy, ImageError, ParameterError, PromptTooLong, RequestsAborted

ERRORS = [
    ParameterError("top_p", 2, "in (0, 1]"),
    ImageError("cat.png", "no such file"),
    PromptTooLong("too long", value=9, limit=8),
    ArgumentError("{given} is not {value}", value="x"),
    EngineBusy(9, 8),
    RequestsAborted("request 1: aborted", [None, 2]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_can_be_pickled(error):
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is type(error) and str(restored) == str(error) and restored.__dict__ == error.__dict__
