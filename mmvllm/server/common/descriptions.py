"""Formats prompts and completions for `--log-requests full`."""

from collections.abc import Sequence
from typing import Any

from mmvllm.server.common.messages import ImagePart, InputMessage, TextPart, ThoughtPart

MAX_TEXT = 4000  # characters of each text


def described_chat(messages: Sequence[InputMessage]) -> list[dict[str, str]]:
    """Return the messages of a conversation for the log, with "<image>" and "<video>" in place of media."""
    return [{"role": message.role, "content": shortened(_content(message.content))} for message in messages]


def described_prompts(prompts: Sequence[str | list[int]]) -> list[str]:
    """Return the prompts of a completion request, or the inputs of an embedding request, for the log."""
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
    """Return a text, or the beginning and the length of a long one."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
