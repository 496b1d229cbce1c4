"""Logs a line of JSON for each completion request when it ends, with `--log-requests`."""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmvllm.entrypoints.tracing import TRACE_HEADERS
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.server.common.descriptions import shortened
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.response_builder import usage_of
from mmvllm.server.errors import ApiError

logger = logging.getLogger("mmvllm.requests")

MAX_HEADER = 256  # characters of a `traceparent`, which has 55


@dataclass(slots=True)
class RequestRecord:
    """The facts for the log line of a request, collected while it is served."""

    job: CompletionJob
    request_id: str
    trace_headers: dict[str, str] | None
    begin: float = field(default_factory=time.perf_counter)
    outputs: list[RequestOutput] = field(default_factory=list)
    status: int = 200
    # The code of its error. The error itself would keep the frames of its traceback, and with them the body.
    error: str | None = None

    @property
    def completions(self) -> list[CompletionOutput]:
        """The completions of all prompts; embeddings have none."""
        outputs = self.outputs if self.job.pooling is None else ()
        return [one for output in outputs for one in output.completions]

    def fail(self, error: ApiError) -> None:
        """Record the status and the code of an error."""
        self.status, self.error = error.status_code, error.code or "invalid_request"

    def forget_logprobs(self) -> None:
        """Drop log-probabilities once the response is serialized; a slow client would keep them in memory."""
        for output in self.outputs:
            output.prompt_logprobs = None
        for completion in self.completions:
            completion.logprobs = None


class RequestLog:
    """Writes lines to the logger `mmvllm.requests`.

    Args:
        mode: "facts" logs no content, "full" also logs the texts of prompts and completions; None logs nothing.
    """

    def __init__(self, mode: str | None):
        self._mode = mode
        if mode is not None:
            logger.setLevel(logging.INFO)

    def write(self, record: RequestRecord) -> None:
        """Log a request that has ended."""
        if self._mode is None:
            return
        facts = _facts(record) | (_texts(record) if self._mode == "full" else {})
        # ASCII, so that clients cannot inject line breaks or control characters of a terminal.
        line = json.dumps(facts).replace("\x7f", "\\u007f")
        logger.info("request %s", line)


def _facts(record: RequestRecord) -> dict[str, Any]:
    job = record.job
    facts = {
        "request_id": record.request_id,
        "id": job.builder.id,
        "model": job.builder.model,
        "status": record.status,
        "error": record.error,
        "finish_reasons": [one.finish_reason for one in record.completions],
        "stream": job.streams,
        "images": job.num_images,
        "videos": job.num_videos,
    }
    return facts | _tokens(record.outputs) | _seconds(record) | _trace(record.trace_headers)


def _tokens(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    usage = usage_of(outputs)
    details = usage.prompt_tokens_details.model_dump()
    return {"prompt_tokens": usage.prompt_tokens, **details, "completion_tokens": usage.completion_tokens}


def _seconds(record: RequestRecord) -> dict[str, float | None]:
    """Return the times of a request, for several prompts the longest ones."""
    metrics = [output.metrics for output in record.outputs]
    return {
        "preparation_s": _longest(each.preparation_time for each in metrics),
        "queue_s": _longest(each.time_in_queue for each in metrics),
        "vision_s": _longest(each.encoding_time for each in metrics),
        "first_token_s": _longest(each.time_to_first_token for each in metrics),
        "total_s": round(time.perf_counter() - record.begin, 6),
    }


def _longest(seconds: Iterable[float | None]) -> float | None:
    longest = max((each for each in seconds if each is not None), default=None)
    return None if longest is None else round(longest, 6)


def _trace(headers: dict[str, str] | None) -> dict[str, str]:
    return {} if headers is None else {"traceparent": headers[TRACE_HEADERS[0]][:MAX_HEADER]}


def _texts(record: RequestRecord) -> dict[str, Any]:
    return {"prompt": record.job.described(), "completions": [shortened(one.text) for one in record.completions]}
