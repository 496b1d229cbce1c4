"""Requests and the engines that have them, when engines end and are started again."""

import pytest

from mmvllm import SamplingParams
from mmvllm.engine.engine_thread import BEGUN
from mmvllm.errors import RequestFailed
from mmvllm.parallel.dispatcher import MAX_LOST_ENGINES
from mmvllm.parallel.engine_core import AbortCommand
from tests.helpers.engine.data_parallel import Dispatched, delta


@pytest.fixture
def dispatched() -> Dispatched:
    return Dispatched()


def test_requests_are_shared_by_the_engines(dispatched):
    for i in range(8):
        dispatched.add(str(i), [i] * 10)
    assert sorted(dispatched.added(0) + dispatched.added(1)) == [str(i) for i in range(8)]
    assert len(dispatched.added(0)) == 4


def test_a_request_that_has_no_token_goes_to_another_engine(dispatched):
    receiver = dispatched.add("a")
    index, key = dispatched.place("a")
    dispatched.engines.tell(index, (key, BEGUN))
    dispatched.engines.lose(index)
    assert dispatched.added(1 - index) == ["a"]
    dispatched.engines.tell(1 - index, (key, BEGUN), (key, delta(is_last=True)))
    assert [item for item in dispatched.delivered(receiver) if item is not BEGUN] == [delta(is_last=True)]
    assert dispatched.dispatcher.num_tracked == 0


def test_a_request_that_has_a_token_ends_with_the_reason(dispatched):
    receiver = dispatched.add("a")
    index, key = dispatched.place("a")
    dispatched.engines.tell(index, (key, BEGUN), (key, delta()))
    dispatched.engines.lose(index)
    assert dispatched.added(1 - index) == [] and dispatched.dispatcher.num_tracked == 0
    error = dispatched.delivered(receiver)[-1]
    assert isinstance(error, RequestFailed) and "was ended by SIGKILL" in str(error)


def test_a_request_that_may_end_engines_is_not_given_to_all_of_them():
    dispatched = Dispatched(size=8)
    receiver = dispatched.add("bad")
    for _ in range(MAX_LOST_ENGINES):
        index, key = dispatched.place("bad")
        dispatched.engines.tell(index, (key, BEGUN))
        dispatched.engines.lose(index)
    assert isinstance(dispatched.delivered(receiver)[-1], RequestFailed)
    assert sum(not down for down in dispatched.engines.down) == 8 - MAX_LOST_ENGINES


def test_a_request_that_has_not_begun_outlives_any_number_of_engines():
    dispatched = Dispatched(size=8)
    dispatched.add("waits")
    for _ in range(7):
        dispatched.engines.lose(dispatched.place("waits")[0])
    assert dispatched.events == [] and dispatched.engines.down[dispatched.place("waits")[0]] is None


def test_requests_wait_while_no_engine_is_up(dispatched):
    for i in range(3):
        dispatched.add(str(i))
    for index in (0, 1):
        dispatched.engines.lose(index)
    dispatched.add("3")
    assert not dispatched.dispatcher.is_up and dispatched.dispatcher.health().status == "starting"
    assert dispatched.dispatcher.stats(2).num_preparing == 6
    dispatched.engines.sent.clear()
    dispatched.engines.restore(1)
    assert dispatched.added(1) == ["0", "1", "2", "3"] and dispatched.dispatcher.is_up
    assert dispatched.dispatcher.stats(0).num_preparing == 0


def test_an_aborted_request_ends_with_its_engine(dispatched):
    receiver = dispatched.add("a")
    index, key = dispatched.place("a")
    dispatched.dispatcher.abort(receiver)
    assert dispatched.engines.sent[-1] == (index, AbortCommand(key))
    dispatched.engines.lose(index)
    assert dispatched.added(1 - index) == []
    assert dispatched.delivered(receiver)[-1].finish_reason == "aborted"


def test_a_request_that_no_engine_has_is_aborted_at_once(dispatched):
    for index in (0, 1):
        dispatched.engines.lose(index)
    receiver = dispatched.add("a")
    dispatched.dispatcher.abort(receiver)
    assert dispatched.delivered(receiver)[-1].finish_reason == "aborted"
    assert dispatched.dispatcher.num_tracked == 0
    dispatched.engines.restore(0)
    assert dispatched.added(0) == []


def test_what_an_engine_sent_of_a_request_that_has_ended_is_dropped(dispatched):
    dispatched.add("a")
    index, key = dispatched.place("a")
    dispatched.engines.tell(index, (key, delta(is_last=True)))
    before = [*dispatched.events]
    dispatched.engines.tell(index, (key, delta()))
    assert dispatched.events == before


def test_totals_outlive_the_engines(dispatched):
    dispatched.engines.tell(0, num_finished=3, num_running=2, num_used_blocks=5, num_output_tokens=7)
    dispatched.engines.tell(1, num_finished=1, num_output_tokens=1)
    dispatched.engines.lose(0)
    stats = dispatched.dispatcher.stats(0)
    assert (stats.num_finished, stats.num_output_tokens, stats.num_running, stats.num_used_blocks) == (4, 8, 0, 0)
    dispatched.engines.restore(0)
    dispatched.engines.tell(0, num_finished=1)
    assert [one.num_finished for one in dispatched.dispatcher.engine_stats()] == [4, 1]
    assert [one.num_blocks for one in dispatched.dispatcher.engine_stats()] == [64, 64]


def test_engines_draw_different_tokens_for_requests_without_a_seed(dispatched):
    for i in range(4):
        dispatched.add(str(i), [i] * 10, SamplingParams(temperature=1.0))
    dispatched.add("own", None, SamplingParams(seed=5))
    seeds = {command.request_id: command.params.seed for _, command in dispatched.engines.sent}
    assert len({*seeds.values()}) == 5 and seeds["own"] == 5


def test_the_failure_of_all_engines_is_told(dispatched):
    dispatched.add("a")
    dispatched.engines.lose(0)
    dispatched.engines.has_ended = True
    dispatched.engines.lose(1)
    assert dispatched.engines.is_given_up
    assert [str(error) for error in dispatched.failures] == [
        "no engine can be started again: its process was ended by SIGKILL"
    ]
