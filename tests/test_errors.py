"""The texts of errors that are made from their facts."""

import pytest

from mmvllm.errors import EngineBusy
from mmvllm.text import counted, listed


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
