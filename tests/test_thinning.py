"""Which cases of a matrix of parameters the default run has."""

from itertools import product
from types import SimpleNamespace

import pytest

from tests.helpers.thinning import thin


class Case:
    """What `thin` reads of a case, and the marker that it adds."""

    def __init__(self, *marks, **params):
        self.nodeid, self.is_slow = "test_x.py::test_x[...]", False
        self.callspec = SimpleNamespace(params=params)
        self._marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str):
        return self._marks.get(name)

    def add_marker(self, mark) -> None:
        assert mark.name == "slow" and not self.is_slow
        self.is_slow = True


def left(cases: list[Case]) -> list[dict]:
    thin(cases)
    return [case.callspec.params for case in cases if not case.is_slow]


def test_each_value_of_each_parameter_is_left():
    cases = [Case(pytest.mark.thinned, a=a, b=b) for a, b in product("xyz", (1, 2))]
    found = left(cases)
    assert len(found) == 3 and {one["a"] for one in found} == set("xyz") and {one["b"] for one in found} == {1, 2}


def test_at_most_as_many_as_the_marker_says_are_left():
    cases = [Case(pytest.mark.thinned(2), a=a) for a in range(6)]
    assert left(cases) == [{"a": 0}, {"a": 3}]


def test_cases_of_other_runs_stand_for_nothing():
    cases = [Case(pytest.mark.thinned, pytest.mark.gpu, a=1), Case(pytest.mark.thinned, a=1), Case(a=1)]
    assert len(left(cases)) == 3
