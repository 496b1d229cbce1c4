"""Several captions per image: from several prompts that share the image, or from several completions per prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.captioning.json_captions import with_object
from mmvllm.errors import ArgumentError
from mmvllm.outputs import RequestOutput

LIST = "captions"  # the field of a record with all captions; absent if the job makes one caption per image


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt, with the name for its captions; `name` is None if the image has a single prompt."""

    name: str | None
    text: str


def named_prompts(given: Any) -> list[dict[str, str]]:
    """Return prompts as dicts with `name` and `prompt`, from strings or from dicts that may lack `name`.

    A prompt without a name is named by its position, "1" for the first. Raises ArgumentError for anything else.
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
    """Return the entries of a record's field `captions`, in the order of the prompts.

    A prompt that failed has one entry with an `error`. `finished` turns the model's text into the caption. With
    `are_objects`, each entry also has the parsed `object`.
    """
    return [
        with_object(entry) if are_objects else entry
        for prompt, output in zip(prompts, outputs, strict=False)  # an unreadable image has a single output
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
    """Return the first failed prompt's name, as the prefix of an error, and its output; None if no prompt failed."""
    failed = next(((i, output) for i, output in enumerate(outputs) if output.error is not None), None)
    if failed is None:
        return None
    i, output = failed
    return (f"prompt {prompts[i].name!r}: " if len(outputs) > 1 else ""), output


def caption_lines(record: dict, keeps_breaks: bool = False) -> str:
    """Return the text of a record's caption file: a line for each caption, without failed ones.

    Training tools read a file's first line, or take each line for a caption. `keeps_breaks` leaves the caption of a
    record with a single one as it is.
    """
    if keeps_breaks and LIST not in record:
        return record["caption"]
    return "\n".join(_one_line(caption) for _, caption in shown_captions(record))


def _one_line(caption: str) -> str:
    return " ".join(filter(None, map(str.strip, caption.splitlines())))


def entries_of(record: dict) -> list[dict]:
    """Return the entries of a record's captions; a record with a single caption is its only entry."""
    return record.get(LIST) or [record]


def shown_captions(record: dict) -> list[tuple[str | None, str]]:
    """Return (prompt name, caption) for each caption to show, without failed ones; a single prompt has no name."""
    if LIST not in record:
        return [(None, record["caption"])]
    return [(one["name"], one["caption"]) for one in record[LIST] if one["caption"] is not None]


def caption_columns(names: Sequence[str | None], n: int) -> list[str]:
    """Return the table columns for the captions of these prompts, with `n` captions each.

    The only caption of a prompt without a name needs no further column: it is in `caption`.
    """
    return [_column(name, i, n) for name in names for i in range(1, n + 1) if name is not None or n > 1]


def with_caption_columns(record: dict) -> dict:
    """Return the record with `captions` as columns; a record with a single caption is unchanged."""
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
    """Return the column name of caption i of n, counted from 1, of the prompt with this name."""
    return "_".join(("caption", *filter(None, (name, str(i) if n > 1 else None))))
