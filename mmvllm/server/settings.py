"""Settings of the HTTP server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmvllm.config import MiB
from mmvllm.media.policy import MediaPolicy
from mmvllm.utils.arguments import check_key

BODY_BYTES = 32 * MiB  # default limit of a body without videos


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names, limits and features of one server; times are in seconds.

    Args:
        model_names: the names by which requests select the model.
        api_keys: keys of which a request must send one; surrounding whitespace is stripped, and an empty tuple admits
            all requests. Health, load, metrics, the version and the demo page need no key. Raises ValueError for a key
            that no HTTP header can carry.
        cors_origins: origins whose pages may call the server; "*" allows every origin.
        max_pixels: limit for images with detail "auto"; default: the checkpoint's limit, but at most 1280 tokens.
        max_images: maximum images per request.
        max_videos: maximum videos per request.
        request_timeout: time limit that covers both fetching images and videos, and generation.
        max_body_bytes: maximum size of a request body; default: see `body_bytes`.
        body_timeout: time limit for receiving a request body.
        max_bodies_bytes: maximum total size of the request bodies, and fetched images and videos, held at a time.
        media: the sources from which images and videos may be read, and their size limits.
        media_names: names of the fields of `media` in error messages, such as command-line options.
        max_stored_bytes: memory for responses of /v1/responses, stored for `previous_response_id`. Each counts with its
            whole conversation; 0 stores none.
        max_kept_media_bytes: memory for images and videos with a `uuid`, whose data later requests may omit; 0 keeps
            none.
        stored_seconds: lifetime of a stored response after it was created or last continued.
        allow_special_tokens: requests may ask for special tokens in messages to be control tokens instead of text.
        trusts_request_templates: requests may set `chat_template`, a Jinja program that the server runs.
        chat_template_kwargs: default arguments of the chat template, which requests may override.
        uses_generation_config: take sampling parameters that a request omits from the checkpoint's
            generation_config.json, and OpenAI's defaults for the rest. If false, use OpenAI's defaults only.
        lora_modules: folders of LoRA adapters, keyed by the model names that select them in requests.
        allow_lora_updating: clients may load adapters from any folder that the server can read, and unload adapters.
        ignores_unknown_fields: ignore unknown fields of requests and name them in the log, instead of refusing them.
        scheduling_policy: "fcfs" (first come, first served), or "priority" (by the `priority` of requests). "fcfs"
            refuses requests with a nonzero `priority`.
        log_requests: log a line per completion request when it ends: "facts", or "full" with texts; None disables it.
        always_includes_usage: put the usage so far into every chunk of a stream, whatever its stream_options say.
        shows_times: add `metrics`, times in milliseconds, to chats and completions with one choice.
        metrics_names: "mmvllm", or "vllm" to serve the metrics under vLLM's names, too.
        shows_tokenizer: serve /tokenizer_info, which returns the tokenizer's configuration and chat template.
        has_demo: serve the demo page at /demo, which needs no API key.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    max_pixels: int | None = None
    max_images: int = 16
    max_videos: int = 4
    request_timeout: float | None = None
    max_body_bytes: int | None = None
    body_timeout: float = 30.0
    max_bodies_bytes: int = 1024 * MiB
    max_stored_bytes: int = 128 * MiB
    max_kept_media_bytes: int = 128 * MiB
    stored_seconds: float = 3600.0
    media: MediaPolicy = field(default_factory=MediaPolicy)
    media_names: Mapping[str, str] = field(default_factory=dict)
    allow_special_tokens: bool = False
    trusts_request_templates: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    uses_generation_config: bool = True
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    allow_lora_updating: bool = False
    ignores_unknown_fields: bool = False
    scheduling_policy: str = "fcfs"
    log_requests: str | None = None
    always_includes_usage: bool = False
    shows_times: bool = False
    metrics_names: str = "mmvllm"
    shows_tokenizer: bool = False
    has_demo: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.api_keys, str):
            raise ValueError("api_keys must be a tuple of keys, got a string; write (key,)")
        keys = tuple(check_key("one of api_keys", key) for key in self.api_keys)
        object.__setattr__(self, "api_keys", keys)

    def body_bytes(self, takes_videos: bool) -> int:
        """Return the maximum size of a body; the default has room for one of the largest videos as a data URI."""
        video = -(-self.media.max_video_bytes // 3) * 4 if takes_videos else 0
        return BODY_BYTES + video if self.max_body_bytes is None else self.max_body_bytes
