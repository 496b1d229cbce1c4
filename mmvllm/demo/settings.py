"""The limits of the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    max_images: int = 8
    timeout: float | None = None
    uses_generation_config: bool = True
    allow_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
