"""Tests that do not decide, because they fail now and then; tests/quarantine.txt names them."""

from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "quarantine.txt"


def quarantined(text: str) -> set[str]:
    """The ids of tests in lines `ID | reason | date`; an id without parameters names all cases of a test."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {test for test, _, _ in (line.rsplit(" | ", 2) for line in lines)}


def set_aside(items: list[pytest.Item], ids: set[str]) -> None:
    """Mark the tests with these ids."""
    for item in items:
        if ids & {item.nodeid, item.nodeid.partition("[")[0]}:
            item.add_marker(pytest.mark.quarantine)
