"""Conversations of the page, and their conversion to engine requests and to gradio's chat messages."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmvllm.demo.images import UploadedImage
from mmvllm.demo.videos import ClipOptions, ClipRules, UploadedVideo
from mmvllm.grounding import Box, Point
from mmvllm.outputs import RequestOutput
from mmvllm.processors.chat.parts import check_numbers
from mmvllm.processors.videos.clip import DEFAULT_FPS
from mmvllm.sampling_params import SamplingParams
from mmvllm.utils.text import shown

Uploaded = UploadedImage | UploadedVideo

_MERMAID = re.compile("mermaid", re.IGNORECASE)


@dataclass(slots=True, eq=False)
class Turn:
    """A question with its media, and the answer generated so far; `note` is shown in small print below it.

    `boxes` maps the path of an image file to the boxes and points that are drawn over the image.
    """

    question: str
    media: tuple[Uploaded, ...] = ()
    answer: str = ""
    note: str = ""
    boxes: dict[str, list[Box | Point]] = field(default_factory=dict)


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
    fps: float = DEFAULT_FPS

    @property
    def pixel_bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of pixels of a resized image.

        Raises ValueError for values that the page's controls do not allow.
        """
        check_numbers({"min_pixels": self.min_pixels, "max_pixels": self.max_pixels})
        return self.min_pixels, self.max_pixels

    @property
    def of_clips(self) -> ClipOptions:
        return ClipOptions(self.fps, self.min_pixels, self.max_pixels)

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the values of the controls, and `defaults` for parameters without a control.

        Raises ValueError for values that the page's controls do not allow.
        """
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
        seed = None if isinstance(self.seed, int) and self.seed < 0 else self.seed
        return SamplingParams(**{**defaults, **{name: getattr(self, name) for name in names}, "seed": seed})


def to_request(turns: Sequence[Turn], options: Options, clips: ClipRules | None = None) -> dict:
    """Return the engine's request for an answer to the last turn; `clips` is required if there are videos.

    A turn that was stopped before its first token is left out, and its media are added to the next question.
    Raises ValueError if the system prompt is not a string.
    """
    if not isinstance(options.system, str):
        raise ValueError(f"the system prompt must be text, got {shown(options.system)}")
    messages = [{"role": "system", "content": options.system}] if options.system.strip() else []
    media = []
    for turn in turns:
        media += [_part(one, options, clips) for one in turn.media]
        if turn is not turns[-1] and not turn.answer:
            continue
        messages.append({"role": "user", "content": [*media, {"type": "text", "text": turn.question}]})
        media = []
        if turn is not turns[-1]:
            messages.append({"role": "assistant", "content": turn.answer})
    return {"messages": messages, "min_pixels": options.min_pixels, "max_pixels": options.max_pixels}


def _part(one: Uploaded, options: Options, clips: ClipRules | None) -> dict:
    if isinstance(one, UploadedImage):
        return {"type": "image", "image": one}
    return {"type": "video", "video": one, **clips.part_keys(options.of_clips)}


def media_in(turns: Sequence[Turn]) -> list[Uploaded]:
    """Return the images and videos of the request for the last turn, in order."""
    return [one for turn in turns for one in turn.media]


def to_chat(turns: Sequence[Turn]) -> list[dict]:
    """Return messages for gradio's Chatbot: the images and videos, the question, and the answer with its note."""
    messages = []
    for turn in turns:
        note = f'<span class="note">{html.escape(turn.note)}</span>'
        messages += [{"role": "user", "content": {"path": str(one.path)}} for one in turn.media]
        messages.append({"role": "user", "content": _text(turn.question)})
        messages.append({"role": "assistant", "content": [_text(without_tags(turn.answer)), _text(note)]})
    return messages


def without_tags(answer: str) -> str:
    """Make Markdown show HTML tags and images as text, since an input image can make a model write anything.

    A zero-width space after `<` and `!` disables them, also in code blocks: an HTML entity would be shown literally
    there, and only a Markdown parser can tell where code begins. Mermaid diagrams are shown as source code.
    """
    answer = re.sub(r"(?:```|~~~)[^\n]*", lambda line: _MERMAID.sub("text", line[0]), answer)
    return re.sub(r"<(?=[a-zA-Z/!?])|!(?=\[)", "\\g<0>\u200b", answer)


def boxes_by_file(boxes: Sequence[Box | Point], media: Sequence[Uploaded]) -> dict[str, list[Box | Point]]:
    """Group the boxes of an answer by the path of the image file that they refer to."""
    files = [str(one.path) for one in media if isinstance(one, UploadedImage)]
    found: dict[str, list[Box | Point]] = {}
    for box in boxes:
        found.setdefault(files[box.image], []).append(box)
    return found


def turn_at(turns: Sequence[Turn], message: int) -> int:
    """Return the index of the turn that a message of `to_chat` belongs to; raises ValueError if there is none."""
    owners = [index for index, turn in enumerate(turns) for _ in range(len(turn.media) + 2)]
    if not 0 <= message < len(owners):
        raise ValueError("this conversation is no longer here; start over")
    return owners[message]


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


class TokenCounts(NamedTuple):
    """The number of tokens of each image and each video of a request."""

    images: Sequence[int] = ()
    videos: Sequence[int] = ()

    @property
    def note(self) -> str:
        """Text with the token counts and their sums."""
        given = (("picture", self.images), ("video", self.videos))
        return " and ".join(f"{_sum(tokens)} {name} tokens" for name, tokens in given if tokens)


def _sum(tokens: Sequence[int]) -> str:
    total = f" = {sum(tokens):,}" if len(tokens) > 1 else ""
    return f"{' + '.join(f'{count:,}' for count in tokens)}{total}"


def answer_note(output: RequestOutput, counts: TokenCounts) -> str:
    """Return the statistics of an answer: time to first token, tokens per second, cached and media tokens."""
    ends = {"length": "cut off at the maximum length", "repetition": "stopped in a repetition", "aborted": "stopped"}
    parts = [ends[output.finish_reason]] if output.finish_reason in ends else []
    if output.first_token_time is not None:
        parts.append(f"first token after {output.first_token_time - output.arrival_time:.2f} s")
        parts += _rate(len(output.token_ids), output.finish_time - output.first_token_time)
        parts.append(f"{output.num_cached_tokens:,} of {output.num_prompt_tokens:,} prompt tokens cached")
    note = " · ".join([*parts, counts.note] if counts.note else parts)
    return note[:1].upper() + note[1:]


def _rate(num_tokens: int, seconds: float) -> list[str]:
    """Return the rate of the tokens after the first; empty if there are none."""
    return [f"{(num_tokens - 1) / seconds:.0f} tokens/s"] if num_tokens > 1 and seconds > 0 else []


def queue_note(position: int | None) -> str:
    """Return the text that is shown until the first token arrives."""
    if not position:
        return "Looking …"
    return "Waiting, next in line" if position == 1 else f"Waiting, {position - 1} ahead of you"
