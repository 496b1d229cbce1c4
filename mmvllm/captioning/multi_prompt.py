"""Several captions of an image: from several prompts, which share the image, or several completions of each prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.captioning.json_captions import with_object
from mmvllm.errors import ArgumentError
from mmvllm.outputs import RequestOutput

LIST = "captions"  # the field of a record with all captions; there is none where a job makes one caption of an image


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt of a job, and what its captions are called; `name` is None where there is one prompt only."""

    name: str | None
    text: str


def named_prompts(given: Any) -> list[dict[str, str]]:
    """Prompts as a job's settings have them, from strings or dicts with `prompt` and perhaps `name`.

    A prompt without a name is called by its place, "1" for the first. Raises ArgumentError for anything else.
    """
    if not isinstance(given, list | tuple) or not given:
        raise ArgumentError("{prompts} must be a list with one prompt or more, each text or {form}", form=_FORM)
    prompts = [_named(number, one) for number, one in enumerate(given, 1)]
    names = [one["name"] for one in prompts]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ArgumentError("{prompts} has two prompts with the name {name!r}; give each its own", name=twice[0])
    return prompts


_FORM = '{"name": ..., "prompt": ...}'


def _named(number: int, given: Any) -> dict[str, str]:
    one = {"prompt": given} if isinstance(given, str) else given
    if not isinstance(one, dict) or "prompt" not in one or one.keys() - {"name", "prompt"}:
        raise ArgumentError(
            "{prompts}: number {number} must be text or {form}, got {given}",
            number=number,
            given=repr(given),
            form=_FORM,
        )
    one = {"name": str(number), **one}
    for key, value in one.items():
        if not isinstance(value, str) or not value.strip():
            raise ArgumentError(
                "{prompts}: the {key} of number {number} must be text that is not empty, got {value}",
                number=number,
                key=key,
                value=repr(value),
            )
    return {"name": one["name"].strip(), "prompt": one["prompt"]}


def captions_of(
    prompts: Sequence[NamedPrompt],
    outputs: Sequence[RequestOutput],
    finished: Callable[[str], str],
    are_objects: bool = False,
) -> list[dict[str, Any]]:
    """The field `captions` of a record, in the order of the prompts.

    A prompt that failed has one entry, with `error`. `finished` makes the caption from the model's text. Of captions
    that are objects, an entry has the parsed `object`.
    """
    return [
        with_object(entry) if are_objects else entry
        for prompt, output in zip(prompts, outputs, strict=False)  # of an image that cannot be read there is one output
        for entry in _entries(prompt, output, finished)
    ]


def _entries(prompt: NamedPrompt, output: RequestOutput, finished: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    asked = {"name": prompt.name, "prompt": prompt.text}
    if output.error is not None:
        error = output.error if output.exception is None else output.exception.reason
        nothing = {"caption": None, "boxes": None, "error": error}
        yield asked | nothing | {"completion_tokens": 0, "finish_reason": "error"}
        return
    for completion in output.completions:
        yield asked | {
            "caption": finished(completion.text),
            "boxes": [box.to_dict() for box in completion.boxes] or None,
            "error": None,
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }


def first_error(prompts: Sequence[NamedPrompt], outputs: Sequence[RequestOutput]) -> tuple[str, RequestOutput] | None:
    """The first prompt that failed, as the record's error names it, and its output; None if none failed."""
    failed = next(((i, output) for i, output in enumerate(outputs) if output.error is not None), None)
    if failed is None:
        return None
    i, output = failed
    return (f"prompt {prompts[i].name!r}: " if len(outputs) > 1 else ""), output


def caption_lines(record: dict) -> str:
    """The text of a record's caption file: its caption, or of several a line each, without the failed ones."""
    if LIST not in record:
        return record["caption"]
    return "\n".join(" ".join(caption.split()) for _, caption in shown_captions(record))


def entries_of(record: dict) -> list[dict]:
    """The captions of a record with what is said of each; a record with one caption is that itself."""
    return record.get(LIST) or [record]


def shown_captions(record: dict) -> list[tuple[str | None, str]]:
    """The captions that a record has, each with the name of its prompt; None for one that needs none."""
    if LIST not in record:
        return [(None, record["caption"])]
    return [(one["name"], one["caption"]) for one in record[LIST] if one["caption"] is not None]


def caption_columns(names: Sequence[str | None], n: int) -> list[str]:
    """The columns of a table for the captions of a job with these prompts, and `n` captions of each.

    The caption of a prompt without a name that has one only is in the column of records, `caption`.
    """
    return [_column(name, i, n) for name in names for i in range(1, n + 1) if name is not None or n > 1]


def with_caption_columns(record: dict) -> dict:
    """The record with `captions` as columns; a record with one caption as it is."""
    entries = record.get(LIST)
    if not entries:
        return record
    of_name: dict[str | None, list[str | None]] = {}
    for one in entries:
        of_name.setdefault(one["name"], []).append(one["caption"])
    columns = {
        _column(name, i, len(captions)): caption
        for name, captions in of_name.items()
        for i, caption in enumerate(captions, 1)
    }
    return record | columns


def _column(name: str | None, i: int, n: int) -> str:
    """Column name of the i-th of n captions, counted from 1, of the prompt with this name."""
    return "_".join(("caption", *filter(None, (name, str(i) if n > 1 else None))))
