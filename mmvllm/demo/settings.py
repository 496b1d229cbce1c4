"""The limits of the page."""

from dataclasses import dataclass, field

from mmvllm.media import MediaPolicy


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The limits of one page.

    Args:
        policy: the maximum size of an image; the page accepts only uploads.
        max_images: maximum number of images in a question.
        timeout: timeout of an answer in seconds.
        uses_generation_config: the sampling controls begin with the values of the checkpoint's generation_config.json.
        allow_special_tokens: special tokens in what visitors write are control tokens, not text.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    max_images: int = 8
    timeout: float | None = None
    uses_generation_config: bool = True
    allow_special_tokens: bool = False
