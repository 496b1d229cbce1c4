"""With `--metrics-names vllm` dashboards and autoscalers that are made for vLLM find their metrics."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmvllm.config import EngineConfig
from mmvllm.engine.stats import EngineStats
from mmvllm.outputs import Delta
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.metrics import vllm_metrics
from mmvllm.server.metrics.metrics import Metrics
from mmvllm.server.settings import ServerSettings
from tests.helpers.serving.server import CHAT, call, chat, make_app, metric_samples

MODEL = ("model_name", "bundled")
ENGINE = ("engine", "0"), MODEL
# What the Grafana dashboards of vLLM, llm-d and KEDA ask for.
QUERIED = {
    "gauge": (
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        *("kv_cache_usage_perc", "cache_config_info"),
    ),
    "counter": (
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("request_success", "admission_rejections"),
    ),
    "histogram": (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
        *("request_inference_time_seconds", "request_num_preemptions"),
        *("inter_token_latency_seconds", "iteration_tokens_total"),
    ),
}


def test_every_metric_that_dashboards_ask_for_is_there_with_its_type(engine):
    app = make_app(engine, metrics_names="vllm")
    types = {family.name: family.type for family in text_string_to_metric_families(call(app, "GET", "/metrics").text)}
    assert {f"vllm:{name}": kind for kind, names in QUERIED.items() for name in names}.items() <= types.items()
    assert any(name.startswith("mmvllm_") for name in types)


def test_only_own_names_are_served_by_default(engine):
    assert "vllm:" not in call(make_app(engine), "GET", "/metrics").text


def test_the_metrics_count_what_requests_use(engine):
    app = make_app(engine, metrics_names="vllm")
    before = metric_samples(app)
    first = call(app, "POST", CHAT, json=chat("Hello", max_tokens=3, ignore_eos=True, n=2)).json()["usage"]
    second = call(app, "POST", CHAT, json=chat("Hello", max_tokens=1, ignore_eos=True)).json()["usage"]
    after = metric_samples(app)

    def moved(name: str, *labels: tuple[str, str]) -> float:
        return after[f"vllm:{name}", *labels] - before.get((f"vllm:{name}", *labels), 0.0)

    usage = {name: first[name] + second[name] for name in ("prompt_tokens", "completion_tokens")}
    assert moved("prompt_tokens_total", *ENGINE) == moved("prefix_cache_queries_total", *ENGINE)
    assert moved("prompt_tokens_total", *ENGINE) == usage["prompt_tokens"]
    assert moved("generation_tokens_total", *ENGINE) == usage["completion_tokens"] == 7
    assert moved("request_success_total", ("finished_reason", "length"), MODEL) == 3
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert moved(f"{name}_count", MODEL) == 2 and moved(f"{name}_sum", MODEL) > 0
    assert moved("request_generation_tokens_sum", MODEL) == 7 and moved("request_prompt_tokens_sum", MODEL) > 10
    assert moved("request_time_per_output_token_seconds_count", MODEL) == 1  # the other has one token
    assert 0 < moved("inter_token_latency_seconds_count", MODEL) <= 4  # of six tokens; the first may share a delta
    assert moved("request_params_n_sum", MODEL) == 3 and moved("request_params_max_tokens_sum", MODEL) == 4
    assert moved("request_inference_time_seconds_sum", MODEL) > moved("request_decode_time_seconds_sum", MODEL)
    assert moved("request_num_preemptions_count", MODEL) == 2 and moved("request_num_preemptions_sum", MODEL) == 0
    steps = moved("iteration_tokens_total_count", *ENGINE)
    assert 4 <= steps == moved("iteration_tokens_total_bucket", ENGINE[0], ("le", "+Inf"), MODEL)
    assert 0 < moved("iteration_tokens_total_sum", *ENGINE) <= usage["prompt_tokens"] + usage["completion_tokens"]
    assert after["vllm:num_requests_running", *ENGINE] == after["vllm:num_requests_waiting", *ENGINE] == 0


@pytest.mark.parametrize(
    ("own", "reason"), [("eos", "stop"), ("stop", "stop"), ("aborted", "abort"), ("error", "error")]
)
def test_completions_are_counted_by_the_reasons_of_vllm(own, reason, engine):
    metrics = Metrics(engine, ServerSettings(model_names=("bundled",), metrics_names="vllm"))
    metrics.observer(SamplingParams())(0, SimpleNamespace(finish_reason=own, output=None, token_ids=[5]))
    labels = {"finished_reason": reason, "model_name": "bundled"}
    assert metrics.registry.get_sample_value("vllm:request_success_total", labels) == 1


def test_tokens_that_come_together_share_their_time(engine, monkeypatch):
    metrics = Metrics(engine, ServerSettings(model_names=("bundled",), metrics_names="vllm"))
    observe = metrics.observer(SamplingParams(n=2))
    for choice, now, num_tokens in ((0, 1.0, 1), (1, 2.0, 1), (0, 5.0, 4), (0, 6.0, 0), (1, 8.0, 1)):
        monkeypatch.setattr(vllm_metrics.time, "perf_counter", lambda now=now: now)
        observe(choice, Delta("a", choice, "", [5] * num_tokens))
    name = "vllm:inter_token_latency_seconds"
    values = [metrics.registry.get_sample_value(f"{name}_{kind}", dict([MODEL])) for kind in ("count", "sum")]
    assert values == [5, 4.0 + 6.0]


def test_each_engine_has_its_own_numbers_and_requests_in_preparation_wait():
    each = [EngineStats(num_waiting=3, num_running=1, num_blocks=4, num_used_blocks=1), EngineStats(num_blocks=8)]
    engine = SimpleNamespace(
        engine_stats=lambda: each,
        stats=lambda: EngineStats(num_preparing=5),
        health=lambda: SimpleNamespace(is_ready=True, engines=[]),
        config=EngineConfig(),
        block_size=16,
        num_refused=2,
    )
    metrics = Metrics(engine, ServerSettings(model_names=("first", "second"), metrics_names="vllm"))

    def value(name: str, index: str, **labels: str) -> float:
        labels |= {"engine": index, "model_name": "first"}
        return metrics.registry.get_sample_value(f"vllm:{name}", labels)

    assert [value("num_requests_waiting", index) for index in "01"] == [8, 0]
    assert [value("num_requests_running", index) for index in "01"] == [1, 0]
    assert [value("kv_cache_usage_perc", index) for index in "01"] == [0.25, 0]
    by_reason = "num_requests_waiting_by_reason"
    assert [value(by_reason, "0", reason=reason) for reason in ("capacity", "deferred")] == [3, 5]
    assert [value(by_reason, "1", reason=reason) for reason in ("capacity", "deferred")] == [0, 0]
    facts = {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True"}
    facts["gpu_memory_utilization"] = "0.9"
    assert [value("cache_config_info", str(i), num_gpu_blocks=num, **facts) for i, num in enumerate("48")] == [1, 1]
    labels = {"model_name": "first", "reason": "max_waiting"}
    assert metrics.registry.get_sample_value("vllm:admission_rejections_total", labels) == 2
