"""Signals while they are deferred, and at the moments when that begins and ends."""

import signal

import pytest

from mmvllm.processes.signals import signals_deferred

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Handled(Exception):
    pass


def handler(number, _):
    raise Handled(number)


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.signal(number, handler) for number in NUMBERS]
    yield
    for number, original in zip(NUMBERS, before, strict=True):
        signal.signal(number, original)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_handled_after_the_block(number):
    done = []
    with pytest.raises(Handled), signals_deferred():
        signal.raise_signal(number)
        done.append(number)
    assert done == [number]
    assert [signal.getsignal(each) for each in NUMBERS] == [handler, handler]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("at", range(4))
def test_handlers_are_restored_wherever_a_signal_arrives(at, number, monkeypatch):
    """Before and after the block each handler is set, one after the other."""
    real, calls = signal.signal, []

    def set_handler(*args):
        before = real(*args)
        calls.append(None)
        if len(calls) == at + 1:
            signal.raise_signal(number)
        return before

    with monkeypatch.context() as patch, pytest.raises(Handled):
        patch.setattr(signal, "signal", set_handler)
        with signals_deferred():
            pass
    assert [signal.getsignal(each) for each in NUMBERS] == [handler, handler]


def test_a_handler_that_is_not_of_python_is_left_alone(monkeypatch):
    """One that a library has set cannot be set again; without it, the signal would end the process."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with pytest.raises(Handled), signals_deferred():
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.undo()
    assert [signal.getsignal(each) for each in NUMBERS] == [handler, handler]
