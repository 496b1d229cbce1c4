"""Encode special tokens in messages and template arguments as text; only the template's are control tokens.

A template is a program that puts the texts of messages into a string, where a <|im_start|> that a user has typed looks
like the template's. To tell them apart, messages are rendered a second time with the first character of every special
token in them replaced by a mark: the special tokens that remain in that rendering come from the template.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.utils.text import with_whole_characters

NEVER = "(?!)"  # a pattern without matches
# Half of a surrogate pair: no valid text contains it, and it is one character, like the character that it replaces.
FIRST_MARK = 0xD800


class SpecialTokens:
    """Distinguishes special tokens of a chat template from special tokens in messages, for one tokenizer.

    Special tokens are the tokens that the tokenizer marks as special, including image placeholders. Other added tokens,
    such as <think>, are markup within a turn, which templates look for in messages; they stay tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content))
        special = [token for _, token in added if token.special]
        self._ids = [token_id for token_id, _ in added]
        self._added = re.compile("|".join(f"({_pattern(token)})" for _, token in added) or NEVER)
        self._special = re.compile("|".join(map(_pattern, special)) or NEVER)
        # Only the normalizer knows all spellings of a normalized special token; the text does not show them.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._has_spellings = normalizer is not None and any(token.normalized for token in special)
        names = [token.content for token in special]
        marks = {first: chr(FIRST_MARK + i) for i, first in enumerate(sorted({name[0] for name in names}))}
        self._marks, self._unmark = marks, {ord(mark): first for first, mark in marks.items()}
        self._first = re.compile(f"(?!{_any(_markup(added, names))})(?:{_any(marks)})")

    def render(self, apply_template: Callable[[Any], str], given: Any) -> tuple[str, str | None]:
        """Render messages, or any value with strings; return the text and, if their special tokens are in it, the text
        with marks.

        The strings must have no lone surrogates, which are the marks. Raises RequestError for a template that renders
        marked strings differently, because it reads or changes the special tokens.
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
        """Tokenize a text with marks; marked special tokens are encoded as text.

        The tokenizer never merges across an added token, so the text between added tokens has the same ids as within
        the whole text.
        """
        ids, start = [], 0
        for match in self._added.finditer(marked):
            ids += [*self._plain_ids(marked[start : match.start()]), self._ids[match.lastindex - 1]]
            start = match.end()
        return ids + self._plain_ids(marked[start:])

    def _plain_ids(self, marked: str) -> list[int]:
        """Tokenize without added tokens, and without changing settings that other threads could see."""
        text, backend = marked.translate(self._unmark), self._tokenizer.backend_tokenizer
        with splitting():
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            pieces = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for piece, _ in pieces for token in backend.model.tokenize(piece)]

    def _marked(self, value: Any) -> Any:
        """Replace the first characters of special tokens by marks in all strings of a value."""
        if isinstance(value, str):
            return self._first.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def splitting() -> Iterator[None]:
    """Raise RequestError if the tokenizers library gives up, for example on an expression after 10 million steps."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic, whose class Python cannot import
            raise
        raise RequestError(f"the checkpoint's tokenizer cannot split the text ({error})") from None


def _pattern(token: Any) -> str:
    """Return the pattern of an added token in a text, with the white space that it absorbs."""
    content = re.escape(token.content)
    word = rf"(?<!\w){content}(?!\w)" if token.single_word else content
    return (r"\s*" if token.lstrip else "") + word + (r"\s*" if token.rstrip else "")


def _markup(added: list[tuple[int, Any]], special: list[str]) -> list[str]:
    """Return the added tokens that neither are special nor share their start with a special token: they get no mark."""
    others = (token.content for _, token in added if not token.special)
    return [other for other in others if not any(name.startswith(other) or other.startswith(name) for name in special)]


def _any(literals: Iterable[str]) -> str:
    return "|".join(map(re.escape, literals)) or NEVER
