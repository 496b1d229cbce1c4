"""The times of the stages of a request, in its output."""

import json

import pytest

from mmvllm import SamplingParams
from mmvllm.outputs import RequestOutput
from tests.helpers.engine.engines import begin_together
from tests.helpers.engine.requests import ask, noise_image

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
WAYS = {
    "alone": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_kvcache_blocks": 12, "max_num_seqs": 4},
    "with look-ahead": {"async_scheduling": True},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", WAYS)
def test_stages_follow_each_other(checkpoint, make_llm, way, monkeypatch):
    llm = make_llm(checkpoint, **WAYS[way])
    begin_together(monkeypatch, llm, 4)
    requests = [ask(noise_image(80, 60, seed), f"Question {seed}?") for seed in range(4)]
    for output in llm.generate_multimodal(requests, PARAMS):
        assert output.preparation_start_time <= output.preparation_end_time <= output.arrival_time
        times = (output.queue_start_time, output.first_scheduled_time, output.encoding_start_time)
        times += (output.first_token_time, output.finish_time)
        assert list(times) == sorted(times)
        metrics = output.metrics
        assert 0 < metrics.encoding_time <= metrics.prefill_time < metrics.e2e_time
        assert metrics.finished_time == output.finish_time and metrics.arrival_time == output.arrival_time
        parts = metrics.time_in_queue + metrics.prefill_time + metrics.decode_time
        assert parts == pytest.approx(metrics.e2e_time)
    assert way != "preempted" or llm.engine.scheduler.num_preemptions


def test_a_request_that_never_began_has_no_times_of_the_engine(llm):
    request_id = llm.add_request("x", PARAMS)
    metrics = llm.abort_request(request_id).metrics
    assert metrics.arrival_time <= metrics.finished_time and metrics.preparation_time is None
    assert (metrics.first_scheduled_time, metrics.time_in_queue, metrics.encoding_time) == (None, None, None)


def test_metrics_are_ready_for_json(llm):
    (output,) = llm.generate_multimodal(ask("x"), PARAMS)
    read = json.loads(json.dumps(output.to_dict()))["metrics"]
    assert read["e2e_time"] == output["metrics"].e2e_time and read["encoding_time"] is None
    assert RequestOutput("r", error="no such file").metrics.e2e_time is None
