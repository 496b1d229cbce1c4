"""What a test needs beyond this process: a marker for each need, set on the test or by a fixture that it uses.

The default run has no test with such a need but those marked `essential`; pyproject.toml lists the markers. A test that
starts a process or opens a socket without the marker that says so fails, so that the default run stays quick and the
same on every machine.
"""

import multiprocessing.process
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

SPAWNS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "mmvllm.spawn")
SOCKETS = ("socket.bind", "socket.connect", "socket.sendto")
EVENTS = dict.fromkeys(SPAWNS, "spawns") | dict.fromkeys(SOCKETS, "network")
ANYTHING = {"slow", "network", "ray", "browser", "docs", "clients", "gpu"}  # tests with these markers may do both
_needed: set[str] | None = None


def needs(marker: str) -> Callable:
    """Decorate a fixture, below `pytest.fixture`: tests that use it get the marker."""

    def decorate(fixture: Callable) -> Callable:
        fixture.needs = marker
        return fixture

    return decorate


def mark_by_fixtures(items: list[pytest.Item]) -> None:
    for item in items:
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            if marker := getattr(definitions[-1].func, "needs", None):
                item.add_marker(marker)


def allowed(item: pytest.Item) -> set[str]:
    markers = {marker.name for marker in item.iter_markers()}
    return {*EVENTS.values()} if markers & ANYTHING else markers


@contextmanager
def watched() -> Iterator[set[str]]:
    """The needs that show while the `with` runs."""
    global _needed
    outer, _needed = _needed, set()
    try:
        yield _needed
    finally:
        _needed = outer


def undeclared(item: pytest.Item) -> Iterator[None]:
    """Wrap a phase of a test: it fails if it starts a process or opens a socket without the marker that says so."""
    with watched() as found:
        result = yield
    if missing := found - allowed(item):
        pytest.fail(f"the test needs the markers {sorted(missing)}; see tests/helpers/needs.py", pytrace=False)
    return result


def _audit(event: str, arguments: tuple) -> None:
    if _needed is None or event not in EVENTS:
        return
    if event in SOCKETS and not isinstance(arguments[1], tuple):
        return  # a Unix socket, which multiprocessing and asyncio use within a program
    _needed.add(EVENTS[event])


sys.addaudithook(_audit)


def _tell_of_spawned_processes() -> None:
    """multiprocessing starts processes without an audit event."""
    start = multiprocessing.process.BaseProcess.start

    def audited(process) -> None:
        sys.audit("mmvllm.spawn")
        start(process)

    multiprocessing.process.BaseProcess.start = audited


_tell_of_spawned_processes()
