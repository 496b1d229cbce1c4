"""Traces: a span for each request with children for its stages, in the trace of the caller, sent to a collector."""

import asyncio
import logging
import os
import sys
import threading
import time
from contextlib import aclosing

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from opentelemetry.util.re import parse_env_headers

from mmvllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from mmvllm.entrypoints import tracing
from mmvllm.entrypoints.tracing import (
    HEADER_VARIABLES,
    RequestTracer,
    make_tracer,
    trace_headers_of,
    traces_url,
)
from mmvllm.errors import ArgumentError, RequestError
from mmvllm.outputs import RequestOutput
from tests.helpers.engine.async_engines import LONG, OPTIONS, SHORT, async_test, collect
from tests.helpers.engine.data_parallel import DATA_PARALLEL
from tests.helpers.engine.engines import slow_steps
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.adapters import make_adapter
from tests.helpers.serving.traces import PARENT, STAGES, TRACE, collector, headers, requests_of

URL = "http://127.0.0.1:1"
IMAGE = noise_image(80, 60)
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter"


@pytest.fixture
def spans(monkeypatch):
    """Call it after the engine's end for the spans of all requests."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(EXPORTER, lambda url, **_: exporter)
    return exporter.get_finished_spans


def test_a_request_of_llm_has_a_span_with_its_stages(checkpoint, make_llm, spans):
    llm = make_llm(checkpoint, otlp_traces_endpoint=URL)
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2, temperature=0.5, top_p=0.9)
    request = ask(IMAGE, "What?", request_id="mine", trace_headers=headers())
    (output,) = llm.generate_multimodal(request, params)
    llm.exit()
    ((root, children),) = requests_of(spans())
    assert sorted(children) == sorted(["preparation", "vision", *STAGES])
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.context.trace_state["vendor"] == "1" and root.resource.attributes["service.name"] == "mmvllm"
    expected = {
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": llm.model,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": output.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "mmvllm.usage.image_tokens": output.num_image_tokens,
        "gen_ai.latency.e2e": output.metrics.e2e_time,
        "gen_ai.latency.time_in_queue": output.metrics.time_in_queue,
        "gen_ai.latency.time_to_first_token": output.metrics.time_to_first_token,
        "gen_ai.latency.time_in_model_prefill": output.metrics.prefill_time,
        "gen_ai.latency.time_in_model_decode": output.metrics.decode_time,
        "mmvllm.latency.vision": output.metrics.encoding_time,
    }
    assert expected.items() <= dict(root.attributes).items()


def test_text_has_no_vision_and_what_is_cached_is_not_encoded_again(checkpoint, make_llm, spans):
    llm = make_llm(checkpoint, otlp_traces_endpoint=URL)
    requests = [ask(IMAGE, "One?"), ask(IMAGE, "Two?"), ask("Three?")]
    outputs = [llm.generate_multimodal(request, SHORT)[0] for request in requests]
    llm.exit()
    assert ["vision" in children for _, children in requests_of(spans())] == [True, False, False]
    assert [output.metrics.encoding_time is None for output in outputs] == [False, True, True]


def test_what_a_request_was_not_sampled_for_is_not_recorded(checkpoint, make_llm, spans):
    llm = make_llm(checkpoint, otlp_traces_endpoint=URL)
    for given in (headers(sampled=False), {"traceparent": "nonsense\n"}, {}, None):
        llm.generate_multimodal(ask("x", trace_headers=given), SHORT)
    llm.exit()
    roots = [root for root, _ in requests_of(spans())]
    assert len(roots) == 3 and all(root.parent is None for root in roots)


@async_test
async def test_requests_of_async_llm_end_in_a_span_however_they_end(checkpoint, spans):
    async with AsyncLLM(checkpoint, **OPTIONS, otlp_traces_endpoint=URL) as engine:
        deltas, _ = await collect(engine, ask(IMAGE, "What?"), SHORT, request_id="whole", trace_headers=headers())
        with pytest.raises(RequestError):
            await collect(engine, ask(b"secret", "?"), SHORT, request_id="bad", trace_headers=headers())
        slow_steps(engine)  # so that the others do not end by themselves
        async with aclosing(engine.generate("x", LONG, request_id="closed")) as stream:
            await anext(stream)
        aborted = asyncio.create_task(collect(engine, "x", LONG, request_id="aborted"))
        while not await engine.abort("aborted"):
            await asyncio.sleep(0.01)
        await aborted
    found = {root.attributes["gen_ai.request.id"]: (root, children) for root, children in requests_of(spans())}
    assert list(found) == ["whole", "bad", "closed", "aborted"]
    root, children = found["whole"]
    assert sorted(children) == sorted(["preparation", "vision", *STAGES])
    assert f"{root.parent.span_id:016x}" == PARENT and root.status.status_code is StatusCode.UNSET
    assert root.attributes["gen_ai.latency.e2e"] == deltas[-1].output.metrics.e2e_time
    bad, _ = found["bad"]
    assert bad.status.status_code is StatusCode.ERROR and bad.attributes["error.type"] == "ImageError"
    assert f"{bad.context.trace_id:032x}" == TRACE and "secret" not in bad.to_json()
    for name in ("closed", "aborted"):
        assert found[name][0].attributes["gen_ai.response.finish_reasons"] == ("aborted",)


def test_the_name_of_an_adapter_stands_for_the_model(checkpoint, make_llm, spans, tmp_path):
    """Also where two names are of one folder."""
    folder = make_adapter(tmp_path / "adapter", checkpoint, target_modules=["q_proj"])
    llm = make_llm(checkpoint, enable_lora=True, otlp_traces_endpoint=URL)
    llm.generate(["x"] * 3, SHORT, lora_request=[None, *(LoRARequest(name, 1, folder) for name in ("a", "b"))])
    llm.exit()
    names = [root.attributes["gen_ai.request.model"] for root, _ in requests_of(spans())]
    assert sorted(names) == sorted([llm.model, "a", "b"])


@async_test
async def test_the_name_of_an_adapter_stands_for_the_model_of_fetched_requests(checkpoint, spans, tmp_path):
    folder = make_adapter(tmp_path / "adapter", checkpoint, target_modules=["q_proj"])

    async def fetched() -> dict:
        return {"text": "x", "lora_request": LoRARequest("mine", 1, folder)}

    async with AsyncLLM(checkpoint, **OPTIONS, enable_lora=True, otlp_traces_endpoint=URL) as engine:
        await collect(engine, fetched, SHORT)
    ((root, _),) = requests_of(spans())
    assert root.attributes["gen_ai.request.model"] == "mine"


@async_test
async def test_the_headers_reach_the_sequences(checkpoint):
    async with (
        slow_steps(AsyncLLM(checkpoint, **OPTIONS)) as engine,
        aclosing(engine.generate("x", LONG, trace_headers=headers())) as stream,
    ):
        await anext(stream)
        (group,) = engine._engine.scheduler.groups.values()
        assert group.trace_headers == headers()


@pytest.mark.slow
@async_test
async def test_several_engines_are_traced_in_one_place(checkpoint, spans):
    async with AsyncLLM(checkpoint, **DATA_PARALLEL, otlp_traces_endpoint=URL) as engine:
        requests = (collect(engine, ask(IMAGE, f"{i}?"), SHORT, trace_headers=headers()) for i in range(6))
        await asyncio.gather(*requests)
    found = requests_of(spans())
    assert len(found) == 6 and all(set(STAGES) <= children.keys() for _, children in found)
    assert {f"{root.context.trace_id:032x}" for root, _ in found} == {TRACE}


@pytest.mark.network
def test_a_collector_gets_the_spans(checkpoint, make_llm):
    with collector() as (url, received):
        llm = make_llm(checkpoint, otlp_traces_endpoint=url)
        llm.generate("x", SHORT)
        llm.exit()
    (resource,) = (each for request in received for each in request.resource_spans)
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == sorted(["llm_request", "preparation", *STAGES])


@pytest.mark.network
def test_a_collector_that_refuses_costs_only_messages(checkpoint, make_llm, caplog):
    with collector(status=400) as (url, received):
        llm = make_llm(checkpoint, otlp_traces_endpoint=url)
        for _ in range(3):
            (output,) = llm.generate("x", SHORT)
            assert output.finish_reason == "length"
            llm._tracer._provider.force_flush()
        llm.exit()
    assert len(received) == 3
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 3 and all("Failed to export spans batch code: 400" in message for message in messages)


def endless(file) -> None:
    while True:
        file.write(b"a" * 2**16)


def dripping(file) -> None:
    for _ in range(100):
        file.write(b"a")
        time.sleep(0.1)


@pytest.mark.network
@pytest.mark.parametrize("status", [200, 307, 400])
@pytest.mark.parametrize("write_body", [endless, dripping])
def test_the_body_of_a_collectors_answer_is_not_read(write_body, status):
    """It may be endless, of gigabytes once it is unpacked, or slow."""
    with collector(status, write_body) as (url, received):
        tracer = make_tracer(url, "m")
        tracer.record(SHORT, headers(), RequestOutput("r", arrival_time=1.0, finish_time=2.0))
        begin = time.monotonic()
        tracer._provider.force_flush()
        tracer.shutdown()
        assert time.monotonic() - begin < 2 and len(received) == 1


def test_an_exporter_that_does_not_end_keeps_no_engine_waiting(monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.05)
    is_over = threading.Event()

    class Hanging(InMemorySpanExporter):
        def shutdown(self):
            is_over.wait(20)

    tracer, begin = RequestTracer(Hanging(), "m"), time.monotonic()
    tracer.shutdown()
    assert time.monotonic() - begin < 5
    is_over.set()


def test_a_span_that_fails_costs_one_warning(caplog):
    tracer = RequestTracer(InMemorySpanExporter(), "m")
    for _ in range(2):
        tracer.record(SHORT, headers(), RequestOutput("r"))  # without times
    tracer.shutdown()
    tracer.shutdown()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a request could not be traced; this warning is logged once"]


@pytest.mark.network
def test_a_login_is_in_no_message(caplog):
    with collector(status=400) as (url, _):
        tracer = make_tracer(f"{url.replace('//', '//user:pa55@')}/v1/traces?token=pa55", "m")
        tracer.record(SHORT, headers(), RequestOutput("r", arrival_time=1.0, finish_time=2.0))
        tracer._provider.force_flush()
        tracer.shutdown()
    unreachable = make_tracer("http://user:pa55@127.0.0.1:9/v1/traces?token=pa55", "m")
    unreachable.record(SHORT, headers(), RequestOutput("r", arrival_time=1.0, finish_time=2.0))
    unreachable.shutdown()
    assert "Failed to export" in caplog.text and "refused" in caplog.text and "already shutdown" not in caplog.text
    with pytest.raises(ArgumentError) as refused:
        traces_url("http://user:pa@55/word@host/v1/traces?token=pa55")
    assert "//***@host/v1/traces" in str(refused.value)
    for message in (caplog.text, str(refused.value)):
        assert not [part for part in ("user:", "pa@", "pa55") if part in message]


HEADERS_OUT_OF_FORM = [
    "x-key=hidden%0A",
    "x-key=hidden%0Aa: b",
    "x-key=hidden%C3%A9",
    "hidden",
    "x-key=hid;den",
    'a="hidden"',
]


@pytest.mark.parametrize("variable", HEADER_VARIABLES)
@pytest.mark.parametrize("headers", HEADERS_OUT_OF_FORM)
def test_headers_that_cannot_be_sent_are_refused_without_showing_them(headers, variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, f"x-good=1, {headers}")
    with pytest.raises(ArgumentError, match=f"otlp_traces_endpoint: {variable} must be NAME=VALUE") as refused:
        LLM(otlp_traces_endpoint=URL)
    assert "hid" not in str(refused.value) + caplog.text


def test_headers_of_the_environment_are_accepted_as_opentelemetry_reads_them(monkeypatch, caplog):
    monkeypatch.setenv(HEADER_VARIABLES[0], "Authorization=Bearer%20key==, x-a=b c,")
    assert traces_url(URL) == f"{URL}/v1/traces"
    read = parse_env_headers(os.environ[HEADER_VARIABLES[0]], liberal=True)
    assert (read, caplog.text) == ({"authorization": "Bearer key==", "x-a": "b c"}, "")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "", 5])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_endpoint_that_is_no_url_is_refused(kind, endpoint):
    with pytest.raises(ArgumentError, match=r"otlp_traces_endpoint must be a URL such as http.*, got .*"):
        kind(otlp_traces_endpoint=endpoint)


def test_the_path_of_an_endpoint():
    assert traces_url("http://host:4318") == traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/otel/v1/traces") == "https://host/otel/v1/traces"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ArgumentError, match=r'needs opentelemetry.*pip install "mmvllm\[otel\]"'):
        LLM(otlp_traces_endpoint=URL)


def test_only_headers_of_a_trace_are_kept():
    assert trace_headers_of({"traceparent": "a", "tracestate": "b", "cookie": "c"}) == {
        "traceparent": "a",
        "tracestate": "b",
    }
    assert trace_headers_of({"tracestate": "b"}) is None


def test_headers_of_a_wrong_type_are_refused(llm):
    with pytest.raises(RequestError, match="trace_headers must be Mapping, got 'x'"):
        llm.generate_multimodal(ask("x", trace_headers="x"), SHORT)
