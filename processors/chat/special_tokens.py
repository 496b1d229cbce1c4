"""Special tokens in messages, and in a template's arguments, are text; only the template's own are control tokens.

A template is a program that puts the texts of messages into a string, where a <|im_start|> that a user has typed looks
like the template's own. To tell them apart, messages are rendered a second time with the first character of every
special token in them replaced by a mark: what is a special token in that rendering was written by the template.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.utils.text import with_whole_characters

NEVER = "(?!)"  # a pattern without matches
FIRST_MARK = (
    0xD800  # half of a surrogate pair: no valid text has it, and it is one character, like the one that it replaces
)


class SpecialTokens:
    """Tells the special tokens of a chat template from those in messages, for one tokenizer.

    Special tokens are those that the tokenizer calls special, image placeholders among them. Other added tokens, such
    as <think>, are markup within a turn, which templates look for in messages; they stay tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content))
        special = [token for _, token in added if token.special]
        self._ids = [token_id for token_id, _ in added]
        self._added = re.compile("|".join(f"({_pattern(token)})" for _, token in added) or NEVER)
        self._special = re.compile("|".join(map(_pattern, special)) or NEVER)
        # A normalized special token has spellings that only the normalizer knows: a text alone does not show them.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._has_spellings = normalizer is not None and any(token.normalized for token in special)
        names = [token.content for token in special]
        marks = {first: chr(FIRST_MARK + i) for i, first in enumerate(sorted({name[0] for name in names}))}
        self._marks, self._unmark = marks, {ord(mark): first for first, mark in marks.items()}
        self._first = re.compile(f"(?!{_any(_markup(added, names))})(?:{_any(marks)})")

    def render(self, apply_template: Callable[[Any], str], given: Any) -> tuple[str, str | None]:
        """What a template makes of messages or of anything with strings; and, if special tokens of theirs are in it,
        the same text with marks.

        The strings have whole characters, since halves of surrogate pairs are marks. Raises RequestError for a template
        that renders marked strings differently, since it reads or changes what they mark.
        """
        text = with_whole_characters(apply_template(given))
        marked_given = self._marked(given)
        if marked_given == given and not self._has_spellings:
            return text, None
        marked = apply_template(marked_given)
        if self._special.findall(marked) == self._special.findall(text) and not self._has_spellings:
            return text, None
        if marked.translate(self._unmark) != text:
            raise RequestError(
                "messages or chat_template_kwargs have special tokens, which the chat template reads or changes, so "
                "that they cannot be encoded as text; remove them, or give allow_special_tokens",
                param="messages",
            )
        return text, marked

    def token_ids(self, marked: str) -> list[int]:
        """Token ids of a text with marks, all of which are encoded as text.

        An added token is a boundary that the tokenizer never merges across, so the stretches between them have the ids
        that they have in the whole text.
        """
        ids, start = [], 0
        for match in self._added.finditer(marked):
            ids += [*self._plain_ids(marked[start : match.start()]), self._ids[match.lastindex - 1]]
            start = match.end()
        return ids + self._plain_ids(marked[start:])

    def _plain_ids(self, marked: str) -> list[int]:
        """The tokenizer's pipeline without added tokens, and without settings that other threads could see."""
        text, backend = marked.translate(self._unmark), self._tokenizer.backend_tokenizer
        with splitting():
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            pieces = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for piece, _ in pieces for token in backend.model.tokenize(piece)]

    def _marked(self, value: Any) -> Any:
        """Replace special tokens by marks in all strings of a value."""
        if isinstance(value, str):
            return self._first.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def splitting() -> Iterator[None]:
    """Raise RequestError where the tokenizers library gives up, for example an expression after 10 million steps."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, whose class Python cannot import
            raise
        raise RequestError(f"the checkpoint's tokenizer cannot split the text ({error})") from None


def _pattern(token: Any) -> str:
    """An added token in a text, with the spaces that it takes to itself."""
    content = re.escape(token.content)
    word = rf"(?<!\w){content}(?!\w)" if token.single_word else content
    return (r"\s*" if token.lstrip else "") + word + (r"\s*" if token.rstrip else "")


def _markup(added: list[tuple[int, Any]], special: list[str]) -> list[str]:
    """Added tokens that are not special and no part of one that is: their first character gets no mark."""
    others = (token.content for _, token in added if not token.special)
    return [other for other in others if not any(name.startswith(other) or other.startswith(name) for name in special)]


def _any(literals: Iterable[str]) -> str:
    return "|".join(map(re.escape, literals)) or NEVER
