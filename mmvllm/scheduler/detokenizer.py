"""Token ids to text while a completion is generated: whole characters, and the stop strings among them."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode


class Pieces(dict[int, str | None]):
    """The text of each token, found when it first occurs; None for one that may be part of a character.

    Only tokens of a byte-level vocabulary have a text of their own, whatever stands before them.
    """

    def __init__(self, tokenizer: Any, skips_special: bool):
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.skips_special = skips_special
        self._without_text = special_ids(tokenizer) if skips_special else frozenset()
        self.are_bytes = isinstance(self.backend.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        # A stream would decode tokens without text again with every token until there is some.
        text = "" if token_id in self._without_text else self._text(token_id)
        self[token_id] = text
        return text

    def _text(self, token_id: int) -> str | None:
        text = self.backend.decode([token_id], skip_special_tokens=self.skips_special) if self.are_bytes else ""
        return text if text and "\ufffd" not in text else None


_pieces: WeakKeyDictionary[Any, dict[bool, Pieces]] = WeakKeyDictionary()  # by tokenizer


def pieces_of(tokenizer: Any, skips_special: bool = True) -> Pieces:
    """Return the text of each token, a mapping that all completions share; with `skips_special` some are empty."""
    made = _pieces.setdefault(tokenizer, {})
    if skips_special not in made:
        made[skips_special] = Pieces(tokenizer, skips_special)
    return made[skips_special]


class TokenDecoder:
    """The tokens of one completion to whole characters, one by one."""

    __slots__ = ("_is_within_character", "_pieces", "_stream")

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        # Has seen the tokens that have no text of their own. A `DecodeStream` decodes all tokens since the last whole
        # character with each token, which takes time quadratic in the length of a text that is not UTF-8.
        self._stream: IncrementalDecoder | DecodeStream | None = None
        self._is_within_character = False

    def decode(self, token_ids: list[int]) -> str:
        """The characters that tokens complete."""
        if len(token_ids) == 1:
            return self.step(token_ids[0])
        return "".join([self.step(token_id) for token_id in token_ids])

    def step(self, token_id: int) -> str:
        """The characters that one token completes."""
        piece = self._pieces[token_id]
        if piece is None or (piece and self._is_within_character):
            return self._step_within(token_id)
        return piece

    def _step_within(self, token_id: int) -> str:
        if self._pieces.are_bytes:
            self._stream = self._stream or getincrementaldecoder("utf-8")(errors="replace")
            text = self._stream.decode(_bytes_of(self._pieces.backend.id_to_token(token_id)))
            self._is_within_character = bool(self._stream.getstate()[0])
        else:
            self._stream = self._stream or DecodeStream(skip_special_tokens=self._pieces.skips_special)
            text = self._stream.step(self._pieces.backend, token_id)
            self._is_within_character = text is None
        return text or ""


class CompletionText:
    """The text of one completion. `found_stop` is the stop string completed last, and where in `text` it begins.

    Text that could become part of a stop string is kept apart: only there a stop string can be completed, so that a
    token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skips_special: bool = True):
        self._decoder, self._stop = TokenDecoder(pieces_of(tokenizer, skips_special)), stop
        self._longest = max(map(len, stop), default=0)
        self._settled: list[str] = []
        self._num_taken = 0  # of these
        self._rest = ""
        self.num_settled = 0  # length of the beginning of `text` that cannot become part of a stop string
        self.found_stop: tuple[str, int] | None = None

    @property
    def text(self) -> str:
        return "".join(self._settled) + self._rest

    def append(self, token_id: int) -> bool:
        """Add a token; True if its text completes a stop string."""
        added = self._decoder.step(token_id)
        self.found_stop = self._find_stop(added) if added else None
        if added:
            self._settle(self._rest + added)
        return self.found_stop is not None

    def take(self) -> str:
        """The settled text that has not been taken before."""
        taken, self._num_taken = "".join(self._settled[self._num_taken :]), len(self._settled)
        return taken

    def _find_stop(self, added: str) -> tuple[str, int] | None:
        """Return the stop string that ends in the added text, the earliest of several, and where it begins."""
        text, before = self._rest + added, len(self._rest)
        starts = ((text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop)
        found = [(start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        start, stop = min(found, key=itemgetter(0))
        return stop, self.num_settled + start

    def _settle(self, text: str) -> None:
        """Divide text before the first place where a stop string may have begun."""
        size = len(text)
        starts = range(max(0, size - self._longest + 1), size)
        end = next((start for start in starts if any(stop.startswith(text[start:]) for stop in self._stop)), size)
        self._settled.append(text[:end])
        self._rest = text[end:]
        self.num_settled += end


def special_ids(tokenizer) -> frozenset[int]:
    """The tokens that leave no text, unless it is asked for."""
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)


def token_bytes(tokenizer, token_id: int) -> bytes:
    """The UTF-8 bytes of a token of a byte-level vocabulary; they may be part of a character."""
    return _bytes_of(tokenizer.convert_ids_to_tokens(token_id))


def _bytes_of(token: str | None) -> bytes:
    """Decode a token as `tokenizers.decoders.ByteLevel` does; None has an id beyond the vocabulary."""
    if token is None:  # up to the padded size of the model's head
        return b""
    byte_of = _byte_of_character()
    return bytes(map(byte_of.__getitem__, token)) if all(map(byte_of.__contains__, token)) else token.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    return {char: byte for byte, char in bytes_to_unicode().items()}
