"""The options of a job whose captions come from an endpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mmvllm.captioning.sources.timeouts import check_seconds
from mmvllm.config import EngineConfig
from mmvllm.errors import ArgumentError
from mmvllm.utils.arguments import check_int

if TYPE_CHECKING:
    from mmvllm.captioning.jobs.endpoint import Endpoint

_ENGINE_FIELDS = frozenset(one.name for one in fields(EngineConfig))
_NOT_SENT = ("min_pixels", "beam_width", "allow_special_tokens", "jpeg_draft")
_DEFAULTS = {  # others: None
    **dict.fromkeys(("dtype", "kv_cache_dtype"), "auto"),
    **dict.fromkeys(("allow_special_tokens", "jpeg_draft", "worker_processes"), False),
    "data_parallel_size": 1,
}


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """An OpenAI-compatible server, and how a job uses it.

    The API key is read from the environment variable OPENAI_API_KEY; it is sent to the server, and written nowhere.

    Args:
        url: the URL of the server, with or without /v1.
        model: name of the model on the server; by default the first of /v1/models.
        concurrency: maximum number of concurrent requests.
        timeout: seconds to wait for a complete answer.
        max_retries: number of times that a failed request is sent again, with growing pauses.
    """

    url: str
    model: str | None = None
    concurrency: int = 8
    timeout: float = 300.0
    max_retries: int = field(default=5, metadata={"least": 0})

    def __post_init__(self):
        check_int("concurrency", self.concurrency)
        check_int("max_retries", self.max_retries, at_least=0)
        check_seconds("endpoint_timeout", self.timeout)
        if find_spec("httpx2") is None:
            raise ArgumentError("{endpoint} needs httpx2: pip install 'mmvllm[endpoint]'")

    def connect(self) -> "Endpoint":
        """Return the server, after asking for its models; raises ArgumentError if it cannot be used."""
        from mmvllm.captioning.jobs.endpoint import Endpoint

        return Endpoint(self.url, self.model, self.timeout, self.max_retries)


def check_endpoint(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an argument that only an engine on this machine has, or that is not sent to servers."""
    names = _ENGINE_FIELDS | {"llm", "model", "ray", "worker_processes", "data_parallel_size", *_NOT_SENT}
    for name, value in given.items():
        if name in names and name != "seed" and value != _DEFAULTS.get(name):
            why = "is not sent to a server" if name in _NOT_SENT else "is for an engine of this machine"
            raise ArgumentError(f"{{{name}}} {why}; leave it out with {{endpoint}}")
