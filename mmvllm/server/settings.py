"""The settings of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmvllm.config import MiB
from mmvllm.media.policy import MediaPolicy
from mmvllm.utils.arguments import check_key

BODY_BYTES = 32 * MiB  # of a request without videos


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names and limits of one server; times are in seconds.

    Args:
        model_names: the names under which requests may address the model.
        api_keys: keys of which requests must have one, without the white space around them; if empty, none is needed.
            Health, load, metrics and the version need none, nor does the demo page. ValueError is raised for a key
            that no HTTP header can carry.
        cors_origins: origins whose pages may call the server; "*" allows every origin.
        max_pixels: limit for images with detail "auto"; default: the checkpoint's limit, but at most 1280 tokens.
        max_images: images per request.
        max_videos: videos per request.
        request_timeout: for fetching images and videos and generating, together.
        max_body_bytes: size of one request body; default: `body_bytes`.
        body_timeout: for receiving a request body.
        max_bodies_bytes: total size of all request bodies and fetched images and videos that are held at a time.
        media: the sources from which images and videos may be read, and their size limits.
        media_names: what errors call fields of `media`, such as the options of a command; by default as they are.
        max_stored_bytes: memory of the responses of /v1/responses that are stored for `previous_response_id`, each
            counted with its whole conversation; 0 stores none.
        max_kept_media_bytes: memory of the images and videos with a `uuid`, which later requests may leave out; 0 keeps
            none.
        stored_seconds: until a stored response expires, after it was made or last continued.
        allow_special_tokens: requests may ask that special tokens in their messages are control tokens, not text.
        trusts_request_templates: requests may have a `chat_template`, which is a program.
        chat_template_kwargs: arguments of the chat template, for requests that do not give these themselves.
        uses_generation_config: sampling parameters that a request leaves out are taken from the checkpoint's
            generation_config.json, where it has them; otherwise, and for the others, OpenAI's defaults.
        lora_modules: folders of adapters by the names under which requests may address them.
        allow_lora_updating: clients may load adapters from any folder that the server can read, and unload adapters.
        ignores_unknown_fields: unknown fields of requests are ignored, and named in the log, instead of refused.
        scheduling_policy: "fcfs", first come, first served; or "priority", by the `priority` of requests, which other
            servers refuse.
        log_requests: log a line per completion request when it ends: "facts", or "full" with texts; None logs none.
        always_includes_usage: each chunk of a stream has the usage so far, whatever its stream_options say.
        shows_times: chats and completions with one choice have `metrics`, with their times in milliseconds.
        metrics_names: "mmvllm", or "vllm" to serve the metrics by the names that they have in vLLM as well.
        shows_tokenizer: also serve /tokenizer_info, the tokenizer's configuration and its chat template.
        has_demo: also serve the demo page at /demo, without API keys.
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
        """The maximum size of a body; by default there is room for one of the largest videos as a data URI."""
        video = -(-self.media.max_video_bytes // 3) * 4 if takes_videos else 0
        return BODY_BYTES + video if self.max_body_bytes is None else self.max_body_bytes
