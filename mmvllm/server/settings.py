"""Settings of the HTTP server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
        max_pixels: maximum number of pixels of an image with detail "auto", which most clients send; by default the
            checkpoint's, but at most 1280 tokens.
        max_images: maximum number of images in a request.
        max_videos: maximum number of videos in a request.
        request_timeout: seconds for a request, from fetching its images and videos to its last token.
        max_body_bytes: maximum size of a request body; by default 33554432, and if the checkpoint takes videos also the
            size of one of the largest videos as a data: URI.
        body_timeout: seconds for receiving a request body.
        max_bodies_bytes: maximum size of all request bodies, fetched images and videos, and unread responses, held at a
            time.
        media: the sources from which images and videos may be read, and their size limits.
        media_names: names of the fields of `media` in error messages, such as command-line options.
        max_stored_bytes: memory for the responses that are stored for previous_response_id, each with its whole
            conversation; 0 stores none.
        max_kept_media_bytes: memory for images and videos with a uuid, which later requests may leave out; 0 keeps
            none.
        stored_seconds: seconds until a stored response expires, after it was made or last continued.
        allow_special_tokens: accept requests whose messages may have control tokens; otherwise special tokens in
            messages are always text.
        trust_request_chat_template: accept requests that bring a chat template, a program that may take much memory and
            10 seconds.
        chat_template_kwargs: default arguments of the chat template, which requests may override.
        uses_generation_config: take sampling parameters that a request omits from the checkpoint's
            generation_config.json, and OpenAI's defaults for the rest. If false, use OpenAI's defaults only.
        lora_modules: folders of LoRA adapters, keyed by the model names that select them in requests.
        allow_lora_updating: let clients load adapters from any folder that the server can read, and unload adapters;
            needs enable_lora.
        ignore_unknown_fields: ignore fields of requests that this server does not know, and name them in the log,
            instead of refusing the request.
        scheduling_policy: fcfs is first come, first served; with priority, requests may have a priority, and lower
            numbers run first. Any client can then overtake all others.
        log_requests: log a line per completion request when it ends: "facts", or "full" with texts; None disables it.
        enable_force_include_usage: put the token counts so far into each chunk of a stream, whatever its stream_options
            say.
        enable_per_request_metrics: put the times of a request with one choice, in milliseconds, into the field metrics
            of its response, or of the last chunk if that has the usage.
        metrics_names: with vllm, also serve the metrics under vLLM's names, for its dashboards and autoscalers.
        enable_tokenizer_info_endpoint: also serve the tokenizer's configuration and the chat template at
            /tokenizer_info.
        demo: also serve the demo page at /demo, which requires no key.
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
    max_stored_bytes: int = field(default=128 * MiB, metadata={"least": 0})
    max_kept_media_bytes: int = field(default=128 * MiB, metadata={"least": 0})
    stored_seconds: float = 3600.0
    media: MediaPolicy = field(default_factory=MediaPolicy)
    media_names: Mapping[str, str] = field(default_factory=dict)
    allow_special_tokens: bool = False
    trust_request_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    uses_generation_config: bool = True
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    allow_lora_updating: bool = False
    ignore_unknown_fields: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    log_requests: Literal["facts", "full"] | None = None
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    metrics_names: Literal["mmvllm", "vllm"] = "mmvllm"
    enable_tokenizer_info_endpoint: bool = False
    demo: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.api_keys, str):
            raise ValueError("api_keys must be a tuple of keys, got a string; write (key,)")
        keys = tuple(check_key("one of api_keys", key) for key in self.api_keys)
        object.__setattr__(self, "api_keys", keys)

    def body_bytes(self, takes_videos: bool) -> int:
        """Return the maximum size of a body; the default has room for one of the largest videos as a data URI."""
        video = -(-self.media.max_video_bytes // 3) * 4 if takes_videos else 0
        return BODY_BYTES + video if self.max_body_bytes is None else self.max_body_bytes
