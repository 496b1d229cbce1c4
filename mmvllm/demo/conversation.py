"""Conversations, and their conversion to engine requests and to chat messages of the page."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.demo.images import UploadedImage
from mmvllm.outputs import RequestOutput
from mmvllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Turn:
    """A question with its images, and the answer generated so far; `note` is shown in small print below it."""

    question: str
    images: tuple[UploadedImage, ...] = ()
    answer: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """The values of the page's controls, in their order; a negative seed means no seed."""

    system: str
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_tokens: int
    seed: int | None
    min_pixels: int
    max_pixels: int

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The values of the controls, and `defaults` for parameters that have none.

        Raises ValueError for values that the page's controls do not allow.
        """
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
        seed = None if isinstance(self.seed, int) and self.seed < 0 else self.seed
        return SamplingParams(**{**defaults, **{name: getattr(self, name) for name in names}, "seed": seed})


def to_request(turns: Sequence[Turn], options: Options) -> dict:
    """The engine's request for an answer to the last turn.

    A turn that was stopped before its first token is left out, and its images are added to the next question.
    Raises ValueError if the system prompt is not a string.
    """
    if not isinstance(options.system, str):
        raise ValueError(f"the system prompt is {options.system!r}, must be text")
    messages = [{"role": "system", "content": options.system}] if options.system.strip() else []
    images = []
    for turn in turns:
        images += [{"type": "image", "image": image} for image in turn.images]
        if turn is not turns[-1] and not turn.answer:
            continue
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": turn.question}]})
        images = []
        if turn is not turns[-1]:
            messages.append({"role": "assistant", "content": turn.answer})
    return {"messages": messages, "min_pixels": options.min_pixels, "max_pixels": options.max_pixels}


def images_in(turns: Sequence[Turn]) -> list[UploadedImage]:
    """The images in the request for the last turn, in its order."""
    return [image for turn in turns for image in turn.images]


def to_chat(turns: Sequence[Turn]) -> list[dict]:
    """Messages for gradio's Chatbot: the images, the question, and the answer with its note."""
    messages = []
    for turn in turns:
        note = f'<span class="note">{html.escape(turn.note)}</span>'
        messages += [{"role": "user", "content": {"path": str(image.path)}} for image in turn.images]
        messages.append({"role": "user", "content": _text(turn.question)})
        messages.append({"role": "assistant", "content": [_text(without_tags(turn.answer)), _text(note)]})
    return messages


def without_tags(answer: str) -> str:
    """Markdown in which HTML tags are shown as text, since an image can make a model write anything.

    A zero-width space after `<` prevents a tag; an HTML entity would be shown literally in code. Fenced code is not
    changed.
    """
    pieces = re.split(r"(^```[^`\n]*\n.*?(?:^```|\Z))", answer, flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = [re.sub(r"<(?=[a-zA-Z/!?])", "<\u200b", piece) for piece in pieces[::2]]
    return "".join(pieces)


def turn_at(turns: Sequence[Turn], message: int) -> int:
    """The index of the turn that a message of `to_chat` belongs to; raises ValueError if there is none."""
    owners = [place for place, turn in enumerate(turns) for _ in range(len(turn.images) + 2)]
    if not 0 <= message < len(owners):
        raise ValueError("this conversation is no longer here; start over")
    return owners[message]


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def answer_note(output: RequestOutput, image_tokens: Sequence[int]) -> str:
    """The statistics of an answer: time to first token, tokens per second, cached prompt tokens, tokens per image."""
    ends = {"length": "cut at the longest answer", "aborted": "stopped"}
    parts = [ends[output.finish_reason]] if output.finish_reason in ends else []
    if output.first_token_time is not None:
        parts.append(f"first token after {output.first_token_time - output.arrival_time:.2f} s")
        parts += _rate(len(output.token_ids), output.finish_time - output.first_token_time)
        parts.append(f"{output.num_cached_tokens:,} of {output.num_prompt_tokens:,} prompt tokens cached")
    if image_tokens:
        parts.append(image_note(image_tokens))
    note = " · ".join(parts)
    return note[:1].upper() + note[1:]


def _rate(num_tokens: int, seconds: float) -> list[str]:
    """The rate of the tokens after the first; empty if there are none."""
    return [f"{(num_tokens - 1) / seconds:.0f} tokens/s"] if num_tokens > 1 and seconds > 0 else []


def image_note(tokens: Sequence[int]) -> str:
    """The number of tokens of each image, and their sum."""
    total = f" = {sum(tokens):,}" if len(tokens) > 1 else ""
    return f"{' + '.join(f'{count:,}' for count in tokens)}{total} picture tokens"


def queue_note(position: int | None) -> str:
    """The text that is shown until the first token."""
    if not position:
        return "Looking …"
    return "Waiting, next in line" if position == 1 else f"Waiting, {position - 1} ahead of you"
