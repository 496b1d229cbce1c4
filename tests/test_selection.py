"""Which tests and which cases of a matrix of parameters the default run has."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.needs import watched
from tests.helpers.quarantine import FILE as QUARANTINE
from tests.helpers.quarantine import quarantined, set_aside
from tests.helpers.thinning import thin

ROOT = Path(__file__).parents[1]


class Case:
    """What `thin` reads of a case, and the markers that it adds and removes."""

    def __init__(self, *marks, case="...", **params):
        self.nodeid = f"test_x.py::test_x[{case}]"
        self.callspec = SimpleNamespace(params=params)
        self.own_markers = list(marks)

    def get_closest_marker(self, name: str):
        return next((mark for mark in self.own_markers if mark.name == name), None)

    def add_marker(self, mark) -> None:
        self.own_markers.append(mark)

    def has(self, name: str) -> bool:
        return self.get_closest_marker(name) is not None


def left(cases: list[Case]) -> list[dict]:
    thin(cases)
    return [case.callspec.params for case in cases if not case.has("slow")]


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


def test_some_cases_of_a_test_are_essential():
    cases = [Case(pytest.mark.essential(2), a=a) for a in range(4)]
    thin(cases)
    assert [case.has("essential") for case in cases] == [True, False, True, False]


def test_a_test_or_one_of_its_cases_is_in_quarantine():
    cases = [Case(case="a | b"), Case(case="c")]
    one = quarantined("# why\n\ntest_x.py::test_x[a | b] | a client is slow | 2026-11-27\n")
    set_aside(cases, one)
    assert [case.has("quarantine") for case in cases] == [True, False]
    set_aside(cases, {"test_x.py::test_x"})
    assert all(case.has("quarantine") for case in cases)


def _spawn() -> None:
    process = multiprocessing.get_context("spawn").Process(target=abs, args=(0,))
    process.start()
    process.join()


@pytest.mark.spawns
@pytest.mark.parametrize(
    "start", [partial(subprocess.run, [sys.executable, "-c", ""]), partial(os.system, "true"), _spawn]
)
def test_a_process_is_noticed(start):
    with watched() as needs:
        start()
    assert needs == {"spawns"}


@pytest.mark.network
def test_a_socket_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with watched() as needs, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("s")
        assert needs == set()
    with watched() as needs, socket.create_server(("127.0.0.1", 0)):
        pass
    assert needs == {"network"}


def test_pytest_collects_every_file_with_tests():
    """The default run looks for `test_*.py` in tests/."""
    for folder, names, files in os.walk(ROOT):
        built = {"build", "dist"} if Path(folder) == ROOT else set()
        no_tests = {name for name in names if name.startswith(".") or Path(folder, name, "pyvenv.cfg").exists()}
        names[:] = {*names} - no_tests - built
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            if re.search(r"^ *(async )?def test_", path.read_text(), re.MULTILINE):
                assert path.name.startswith("test_") and path.is_relative_to(ROOT / "tests"), path.relative_to(ROOT)


def test_the_full_check_names_every_folder_with_tests():
    """Once in a part for slow tests, which have no marker that names them all."""
    slow = re.findall(r" slow (?:--|tests/).*", (ROOT / ".ci" / "full").read_text())
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    named = re.findall(r"tests/(\w+)(?= )", " ".join(slow))
    assert folders and sorted(folders) == sorted(named)


def test_what_is_in_quarantine_exists():
    for test in quarantined(QUARANTINE.read_text()):
        path, name = test.partition("[")[0].split("::", 1)
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text(), test
