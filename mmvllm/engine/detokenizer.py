"""Stop strings, found while the answer is being generated."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream


class StopStrings:
    """Follows one answer's text. `found` is where in it the stop string that was completed last begins, or None."""

    def __init__(self, tokenizer, stop: Sequence[str]):
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)  # gives whole characters only
        self._stop = stop
        self.text = ""
        self.found: int | None = None

    def append(self, token_id: int) -> bool:
        """Add a token; True if its text completes a stop string."""
        added = self._stream.step(self._backend, token_id) or ""
        before = len(self.text)
        self.text += added
        # A stop string that ends in the added text begins at most its own length before it.
        starts = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        self.found = min((start for start in starts if start >= 0), default=None) if added else None
        return self.found is not None
