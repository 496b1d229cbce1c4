"""What the operator of a server chose."""

from dataclasses import dataclass, field

from mmvllm.media import MediaPolicy

MiB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The limits and names of one server; times are in seconds.

    Args:
        model_names: what requests may call the model.
        api_keys: any of these opens /v1; none: /v1 is open.
        cors_origins: pages from these origins may call the server ("*": from any).
        max_pixels: of a picture with detail "auto"; by default the checkpoint's, but no more than 1280 tokens.
        max_images: in one request.
        request_timeout: for fetching pictures and generating together.
        max_body_bytes: of one request.
        body_timeout: within which a body must have arrived.
        max_bodies_bytes: of all bodies and fetched pictures that are held at once.
        media: from where pictures may come, and how large they may be.
        has_demo: serve the demo page at /demo too, to everyone.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_pixels: int | None = None
    max_images: int = 16
    request_timeout: float | None = None
    max_body_bytes: int = 32 * MiB
    body_timeout: float = 30.0
    max_bodies_bytes: int = 512 * MiB
    media: MediaPolicy = field(default_factory=MediaPolicy)
    has_demo: bool = False
