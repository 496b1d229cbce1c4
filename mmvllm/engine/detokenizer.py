"""Token ids to text while a completion is generated: whole characters, and the stop strings among them."""

from collections.abc import Sequence
from functools import cache

from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode


class CompletionText:
    """The text of one completion. `stop_at` is where in `text` the stop string completed last begins, or None."""

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)  # gives whole characters only
        self._special_ids = special_ids(tokenizer)
        self._stop = stop
        self.text = ""
        self.stop_at: int | None = None
        self._settled = 0

    def append(self, token_id: int) -> bool:
        """Add a token; True if its text completes a stop string."""
        # Special tokens leave no text: the stream would decode them again with every token until there is some.
        added = "" if token_id in self._special_ids else self._stream.step(self._backend, token_id) or ""
        before = len(self.text)
        self.text += added
        # A stop string that ends in the added text begins at most its own length before it.
        starts = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        self.stop_at = min((start for start in starts if start >= 0), default=None) if added else None
        return self.stop_at is not None

    @property
    def num_settled(self) -> int:
        """Length of the beginning of `text` that cannot become part of a stop string."""
        size, longest = len(self.text), max(map(len, self._stop), default=0)
        # What is settled stays settled; searching it again would take longer with every token.
        self._settled = next(
            (
                start
                for start in range(max(self._settled, size - longest + 1), size)
                if any(stop.startswith(self.text[start:]) for stop in self._stop)
            ),
            size,
        )
        return self._settled


def special_ids(tokenizer) -> frozenset[int]:
    """The tokens that leave no text."""
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)


def token_bytes(tokenizer, token_id: int) -> bytes:
    """The UTF-8 bytes that a token of a byte-level vocabulary stands for; they may be part of a character."""
    token, byte_of = tokenizer.convert_ids_to_tokens(token_id), _byte_of_character()
    if token is None:  # ids beyond the vocabulary, up to the padded size of the model's head
        return b""
    if token_id in tokenizer.added_tokens_decoder or not all(char in byte_of for char in token):
        return token.encode()
    return bytes(byte_of[char] for char in token)


@cache
def _byte_of_character() -> dict[str, int]:
    return {char: byte for byte, char in bytes_to_unicode().items()}
