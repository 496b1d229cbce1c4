"""A conversation: what was asked and answered, as the engine and as the page want it."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmvllm.demo.pictures import Picture
from mmvllm.outputs import RequestOutput
from mmvllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Turn:
    """A question with its pictures, and the answer as far as it has come; `note` is the small print under it."""

    question: str
    pictures: tuple[Picture, ...] = ()
    answer: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What the page's controls say, in their order; a seed below 0 is none."""

    system: str
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    min_pixels: int
    max_pixels: int

    @property
    def sampling_params(self) -> SamplingParams:
        """Raises ValueError for what no control of the page would say."""
        seed = None if isinstance(self.seed, int) and self.seed < 0 else self.seed
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=seed)


def to_request(turns: Sequence[Turn], options: Options) -> dict:
    """The engine's request for an answer to the last turn.

    Turns that were stopped before any answer are left out; their pictures go with the next question.
    Raises ValueError for a system prompt that is no text.
    """
    if not isinstance(options.system, str):
        raise ValueError(f"the system prompt is {options.system!r}, must be text")
    messages = [{"role": "system", "content": options.system}] if options.system.strip() else []
    pictures = []
    for turn in turns:
        pictures += [{"type": "image", "image": picture} for picture in turn.pictures]
        if turn is not turns[-1] and not turn.answer:
            continue
        messages.append({"role": "user", "content": [*pictures, {"type": "text", "text": turn.question}]})
        pictures = []
        if turn is not turns[-1]:
            messages.append({"role": "assistant", "content": turn.answer})
    return {"messages": messages, "min_pixels": options.min_pixels, "max_pixels": options.max_pixels}


def pictures_in(turns: Sequence[Turn]) -> list[Picture]:
    """Those that the request for the last turn has, in its order."""
    return [picture for turn in turns for picture in turn.pictures]


def to_chat(turns: Sequence[Turn]) -> list[dict]:
    """Messages for gradio's Chatbot: each picture, the question, and the answer with its note."""
    messages = []
    for turn in turns:
        note = f'<span class="note">{html.escape(turn.note)}</span>'
        messages += [{"role": "user", "content": {"path": str(picture.path)}} for picture in turn.pictures]
        messages.append({"role": "user", "content": _text(turn.question)})
        messages.append({"role": "assistant", "content": [_text(without_tags(turn.answer)), _text(note)]})
    return messages


def without_tags(answer: str) -> str:
    """Markdown in which HTML is only text, code in fences left as it is: a picture may make a model write anything.

    A space of no width keeps `<` from what would make a tag of it; an entity would be shown as such in code.
    """
    pieces = re.split(r"(^```[^`\n]*\n.*?(?:^```|\Z))", answer, flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = [re.sub(r"<(?=[a-zA-Z/!?])", "<\u200b", piece) for piece in pieces[::2]]
    return "".join(pieces)


def turn_at(turns: Sequence[Turn], message: int) -> int:
    """The place of the turn that has a message of `to_chat`; raises ValueError if none has."""
    owners = [place for place, turn in enumerate(turns) for _ in range(len(turn.pictures) + 2)]
    if not 0 <= message < len(owners):
        raise ValueError("this conversation is no longer here; start anew")
    return owners[message]


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def answer_note(output: RequestOutput, picture_tokens: Sequence[int]) -> str:
    """What an answer took: time to first token, tokens per second, cached of prompt tokens, tokens of each picture."""
    ends = {"length": "cut at the longest answer", "aborted": "stopped"}
    parts = [ends[output.finish_reason]] if output.finish_reason in ends else []
    if output.first_token_time is not None:
        parts.append(f"first token after {output.first_token_time - output.arrival_time:.2f} s")
        parts += _rate(len(output.token_ids), output.finish_time - output.first_token_time)
        parts.append(f"{output.num_cached_tokens:,} of {output.num_prompt_tokens:,} prompt tokens cached")
    if picture_tokens:
        parts.append(picture_note(picture_tokens))
    note = " · ".join(parts)
    return note[:1].upper() + note[1:]


def _rate(num_tokens: int, seconds: float) -> list[str]:
    """Of the tokens after the first; nothing where there is none to measure."""
    return [f"{(num_tokens - 1) / seconds:.0f} tokens/s"] if num_tokens > 1 and seconds > 0 else []


def picture_note(tokens: Sequence[int]) -> str:
    """The tokens of each picture, and of all."""
    total = f" = {sum(tokens):,}" if len(tokens) > 1 else ""
    return f"{' + '.join(f'{count:,}' for count in tokens)}{total} picture tokens"


def queue_note(position: int | None) -> str:
    """What is shown until the first token comes."""
    if not position:
        return "Looking …"
    return "Waiting, next in line" if position == 1 else f"Waiting, {position - 1} ahead of you"
