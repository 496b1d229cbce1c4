"""Matrices of parameters: the default run has each value of each parameter, the slow tests have the other cases."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

OTHER_RUNS = ("slow", "gpu", "browser", "clients")  # cases with these markers are in no default run


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests with the marker `thinned` as slow: those that add no value of a parameter to the others.

    With a number, `thinned(3)`, so many of the others are left at most, evenly spread.
    """
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_thinned = item.get_closest_marker("thinned") is not None and hasattr(item, "callspec")
        if is_thinned and not any(map(item.get_closest_marker, OTHER_RUNS)):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        kept = _cover([{(name, id(value)) for name, value in case.callspec.params.items()} for case in cases])
        kept = _spread(kept, *cases[0].get_closest_marker("thinned").args)
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.slow)


def _cover(cases: list[set[tuple[str, int]]]) -> set[int]:
    """Indices of cases that together have all that any of them has: one after the other that which adds most."""
    missing, kept = set().union(*cases), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        kept.add(best)
        missing -= cases[best]
    return kept


def _spread(kept: set[int], most: int | None = None) -> set[int]:
    ordered = sorted(kept)
    return kept if most is None or most >= len(kept) else {ordered[i * len(ordered) // most] for i in range(most)}
