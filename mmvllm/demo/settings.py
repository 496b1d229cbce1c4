"""The limits and options of the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmvllm.media.policy import MediaPolicy


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The limits and options of one page.

    Args:
        policy: maximum sizes of an image and of a video; the page accepts only uploads.
        max_images: maximum number of images in a question.
        max_videos: maximum number of videos in a question.
        timeout: timeout of an answer in seconds.
        uses_generation_config: the sampling controls begin with the values of the checkpoint's generation_config.json.
        allow_special_tokens: treat special tokens that visitors write as control tokens instead of text.
        chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    max_images: int = 8
    max_videos: int = 2
    timeout: float | None = None
    uses_generation_config: bool = True
    allow_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_file_bytes(self) -> int:
        return max(self.policy.max_bytes, self.policy.max_video_bytes)

    @property
    def max_files(self) -> int:
        """Maximum number of files in a question."""
        return self.max_images + self.max_videos

    @property
    def max_upload_bytes(self) -> int:
        """Maximum total size in bytes of the files of a question."""
        return self.max_images * self.policy.max_bytes + self.max_videos * self.policy.max_video_bytes
