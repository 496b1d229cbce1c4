"""Prompts and completions as `--log-requests full` shows them."""

from collections.abc import Sequence
from typing import Any

from mmvllm.server.common.messages import ImagePart, InputMessage, TextPart, ThoughtPart

MAX_TEXT = 4000  # characters of each text


def described_chat(messages: Sequence[InputMessage]) -> list[dict[str, str]]:
    """The messages of a conversation for the log, with the kind of medium in place of images and videos."""
    return [{"role": message.role, "content": shortened(_content(message.content))} for message in messages]


def described_prompts(prompts: Sequence[str | list[int]]) -> list[str]:
    """The prompts of a completion request, or the inputs of one for embeddings, for the log."""
    return [shortened(prompt if isinstance(prompt, str) else str(prompt)) for prompt in prompts]


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, TextPart | ThoughtPart):
        return part.text if isinstance(part, TextPart) else ""
    return "<image>" if isinstance(part, ImagePart) else "<video>"


def shortened(text: str) -> str:
    """The beginning of a long text, and its length."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
