"""Which cases of a matrix of parameters are part of the default run, by the markers `thinned` and `essential`."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

OTHER_RUNS = ("slow", "gpu", "browser", "clients")  # cases with these markers represent no others


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests with the marker `thinned` as slow: those that add no value of a parameter to the others.

    With a number, `thinned(3)`, at most that many cases are left, evenly spread. `essential(2)` keeps the marker on two
    cases of a test, evenly spread, and removes it from the others.
    """
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        _limit_essential(cases)
        _mark_others_slow(cases)


def _limit_essential(cases: list[pytest.Item]) -> None:
    marker = cases[0].get_closest_marker("essential")
    if marker is not None and marker.args:
        kept = _spread(set(range(len(cases))), *marker.args)
        for index, case in enumerate(cases):
            if index not in kept:
                case.own_markers.remove(marker)


def _mark_others_slow(cases: list[pytest.Item]) -> None:
    cases = [case for case in cases if case.get_closest_marker("thinned") is not None]
    cases = [case for case in cases if not any(map(case.get_closest_marker, OTHER_RUNS))]
    if not cases:
        return
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
