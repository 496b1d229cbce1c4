"""OpenTelemetry traces: a span for each request, with children for its stages, sent with OTLP over HTTP.

Names of spans and attributes follow vLLM (vllm/tracing) and OpenTelemetry's conventions for generative AI.
Spans are created when a request ends, from the times in its output, so tracing costs nothing per token or step. A
failure of tracing, such as a collector that does not answer, does not affect requests.
"""

import atexit
import io
import logging
import os
import re
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import mmvllm
from mmvllm.errors import ArgumentError
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.sampling_params import UNLIMITED, SamplingParams
from mmvllm.utils.text import without_logins
from mmvllm.utils.time_limit import TimeLimit

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

TRACE_HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context
HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")  # the first that is set counts
# At shutdown: the time to send the remaining spans, and then the time to end an attempt.
FLUSH_SECONDS, END_SECONDS = 2.5, 0.5
CREDENTIAL_VARIABLES = (  # of OpenTelemetry: either names a package that provides the exporter's session
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)

_SPLIT_LOGIN = re.compile(r"\s|//[^/]*/.*@")  # an unencoded space, or an unencoded slash in a password
_HEADER = re.compile(r"""[^\s"(),/:;<=>?@\\{}\[\]]+\s*=[^",;\\]*""")  # that OpenTelemetry accepts in the environment


def trace_headers_of(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the trace headers of an HTTP request; None if it belongs to no trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers} if TRACE_HEADERS[0] in headers else None


def traces_url(endpoint: str) -> str:
    """Return the URL that receives the spans: `endpoint`, with the path /v1/traces if it has none.

    Raises ArgumentError if the URL is invalid, or if OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
    is_whole = parts is not None and not _SPLIT_LOGIN.search(endpoint)
    if not is_whole or parts.scheme not in ("http", "https") or not parts.netloc:
        message = "{otlp_traces_endpoint} must be a URL such as http://localhost:4318 (OTLP over HTTP), got {value}"
        raise ArgumentError(message, value=repr(_public(endpoint) if isinstance(endpoint, str) else endpoint))
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        message = '{otlp_traces_endpoint} needs {name}, which is not installed; pip install "mmvllm[otel]"'
        raise ArgumentError(message, name=error.name) from None
    _check_headers()
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def _check_headers() -> None:
    """Raise ArgumentError for unusable headers in the environment, since OpenTelemetry's errors would reveal them."""
    variable = next((name for name in HEADER_VARIABLES if os.environ.get(name)), HEADER_VARIABLES[0])
    for header in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        sent = unquote(header)
        if not (_HEADER.fullmatch(header) and sent.isascii() and sent.isprintable()):
            message = "{otlp_traces_endpoint}: {variable} must be NAME=VALUE,NAME=VALUE, percent-encoded ASCII"
            raise ArgumentError(message, variable=variable)


def check_endpoint(endpoint: str | None) -> None:
    """Raise ArgumentError for an endpoint that cannot be used."""
    if endpoint is not None:
        traces_url(endpoint)


def make_tracer(endpoint: str | None, model: str) -> "RequestTracer | None":
    """Create the tracer that sends the spans of an engine's requests to a collector; None without an endpoint."""
    if endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url, has_own_session = traces_url(endpoint), any(map(os.environ.get, CREDENTIAL_VARIABLES))
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_edit_message)  # adding it again changes nothing
    return RequestTracer(OTLPSpanExporter(url, session=None if has_own_session else _status_session()), model)


def _edit_message(record: logging.LogRecord) -> bool:
    """Hide secrets in messages of the exporter, and the message that `RequestTracer` shuts it down twice."""
    record.msg, record.args = _public(record.getMessage()), None
    return not record.msg.startswith("Exporter already shutdown")


def _status_session() -> "requests.Session":
    """Create a session that reads only the status of a response: the body is not used, and it may be endless.

    The session does not follow redirects.
    """
    import requests

    class StatusSession(requests.Session):
        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            response = super().send(request, **options | {"stream": True})
            response.close()
            response.raw = io.BytesIO()
            return response

        def get_redirect_target(self, response: requests.Response) -> None:
            """Return None, since `send` would otherwise read the body of a redirect."""

    return StatusSession()


class RequestTracer:
    """Creates and exports the spans of requests; threads may share it.

    OpenTelemetry's environment variables configure sampling, the size of batches and other settings.

    Args:
        model: name of the model in the spans of requests without an adapter.
    """

    def __init__(self, exporter: "SpanExporter", model: str):
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model, self._propagator = model, TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "mmvllm"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # it may take half a minute
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mmvllm", mmvllm.__version__)
        self._has_failed = self._is_shut_down = False
        atexit.register(_shutdown_if_alive, weakref.ref(self))

    def record(
        self,
        params: SamplingParams,
        headers: Mapping[str, str] | None,
        output: RequestOutput,
        error_type: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Create the spans of a request that has ended; `error_type` is the class of its error, if any.

        The name of its adapter, if any, is recorded as the model's name.
        """
        try:
            model = adapter or self._model
            self._record(params, headers, output, error_type or ("RequestFailed" if output.error else None), model)
        except Exception:  # a request never fails because of its trace
            if not self._has_failed:
                logger.warning("a request could not be traced; this warning is logged once", exc_info=True)
            self._has_failed = True

    def _record(
        self,
        params: SamplingParams,
        headers: Mapping[str, str] | None,
        output: RequestOutput,
        error_type: str | None,
        model: str,
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        begin = min(filter(None, (output.arrival_time, output.preparation_start_time)))
        parent, start = self._propagator.extract(headers or {}), _nanoseconds(begin)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=start)
        if span.is_recording():
            span.set_attributes(_of_request(model, params) | _of_output(output))
            if error_type is not None:  # not its message, which may quote the prompt
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", error_type)
            context = set_span_in_context(span)
            for name, first, last in _stages(output):
                child = self._tracer.start_span(name, context, start_time=_nanoseconds(first))
                child.end(_nanoseconds(max(first, last)))
        span.end(_nanoseconds(max(begin, output.finish_time)))

    def shutdown(self) -> None:
        """Send the recorded spans, in at most `FLUSH_SECONDS + END_SECONDS`; safe to call twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with suppress(Exception):
            TimeLimit(FLUSH_SECONDS).run(self._provider.force_flush)
        with suppress(Exception):
            TimeLimit(END_SECONDS).run(self._end)

    def _end(self) -> None:
        self._exporter.shutdown()  # ends an attempt that is waiting for the collector
        self._provider.shutdown()


def _shutdown_if_alive(ref: "weakref.ref[RequestTracer]") -> None:
    tracer = ref()
    if tracer is not None:
        tracer.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _stages(output: RequestOutput) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the stages that the request has reached; the ViT runs within the prefill."""
    end, encoding_start = output.finish_time, output.encoding_start_time
    queued, scheduled, first_token = output.queue_start_time, output.first_scheduled_time, output.first_token_time
    reached_engine = scheduled is not None or output.preparation_end_time is not None
    encoded = None if encoding_start is None else encoding_start + output.encoding_time
    stages = [
        ("preparation", output.preparation_start_time, output.preparation_end_time),
        ("queue", queued if reached_engine else None, scheduled or end),
        ("prefill", scheduled, first_token or end),
        ("vision", encoding_start, encoded),
        ("decode", first_token, end),
    ]
    return [(name, start, until) for name, start, until in stages if start is not None and until is not None]


def _of_request(model: str, params: SamplingParams) -> dict[str, Any]:
    limit = {} if params.max_tokens == UNLIMITED else {"gen_ai.request.max_tokens": params.max_tokens}
    return {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        **limit,
    }


def _of_output(output: RequestOutput) -> dict[str, Any]:
    metrics, completion = output.metrics, sum(len(one.token_ids) for one in output.completions)
    attributes = {
        "gen_ai.request.id": output.request_id,
        "gen_ai.usage.num_sequences": len(output.completions),
        "gen_ai.usage.prompt_tokens": output.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": completion,
        "gen_ai.usage.input_tokens": output.num_prompt_tokens,  # the same two counts under their newer names
        "gen_ai.usage.output_tokens": completion,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in output.completions],
        "mmvllm.usage.cached_tokens": output.num_cached_tokens,
        "mmvllm.usage.image_tokens": output.num_image_tokens,
        "mmvllm.usage.video_tokens": output.num_video_tokens,
        "gen_ai.latency.time_in_queue": metrics.time_in_queue,
        "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
        "gen_ai.latency.e2e": metrics.e2e_time,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_time,
        "gen_ai.latency.time_in_model_decode": metrics.decode_time,
        "mmvllm.latency.preparation": metrics.preparation_time,
        "mmvllm.latency.vision": metrics.encoding_time,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def ended_output(request_id: str, arrival_time: float, num_completions: int, error_type: str | None) -> RequestOutput:
    """Return an output to trace a request that has just failed or been aborted without one."""
    reason = "aborted" if error_type is None else "error"
    completions = [CompletionOutput("", [], reason) for _ in range(num_completions)]
    return RequestOutput(request_id, completions, arrival_time=arrival_time, finish_time=time.time())


def _public(text: str) -> str:
    """Remove the logins and queries of URLs from a text, since they may contain secrets."""
    return re.sub(r"\?\S+", "?***", without_logins(text))
