"""What the page allows."""

from dataclasses import dataclass, field

from mmvllm.media import MediaPolicy


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The limits of one page.

    Args:
        policy: how large a picture may be; the page takes uploads alone.
        max_images: in one question.
        timeout: seconds for an answer.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    max_images: int = 8
    timeout: float | None = None
