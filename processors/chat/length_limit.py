"""Prompts that cannot fit into the context, refused before time is spent on tokenizing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmvllm.errors import PromptTooLong


class Truncation(NamedTuple):
    """How many tokens of a prompt are kept: its last ones if the side that is cut is "left", else its first."""

    num_tokens: int
    side: str = "left"

    def cut(self, content: Any, length: int | None = None) -> Any:
        """Cut token ids, or a text to a length in characters."""
        length = self.num_tokens if length is None else length
        return content[:length] if self.side == "right" else content[-length:]


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The least number of tokens that a prompt has, whichever tokens its text is made of."""

    max_model_len: int
    max_token_length: int  # in characters

    @classmethod
    def of(cls, tokenizer: Any, max_model_len: int) -> "LengthLimit":
        return cls(max_model_len, max(map(len, tokenizer.get_vocab())))

    def cut(self, text: str, truncation: Truncation) -> str:
        """Cut a text, so that it still has more tokens than are kept, or too many, or is whole."""
        num_tokens = min(truncation.num_tokens, self.max_model_len) + 1
        return truncation.cut(text, num_tokens * self.max_token_length)

    def check(self, prompt: str | Sequence[int], room: int = 1) -> None:
        """Raise PromptTooLong for a text or token ids that leave no `room` for a completion."""
        if isinstance(prompt, str):
            return self.check_characters(len(prompt), room=room)
        self._check_tokens(len(prompt), room)

    def check_characters(self, number: int, num_extra_tokens: int = 0, room: int = 1) -> None:
        """Raise PromptTooLong as `check` does for a text of this many characters, and further tokens."""
        self._check_tokens(-(-number // self.max_token_length) + num_extra_tokens, room)

    def _check_tokens(self, num_tokens: int, room: int) -> None:
        if num_tokens + room > self.max_model_len:
            problem = f"the prompt has at least {num_tokens} tokens"
            raise PromptTooLong(problem, "shorten it", value=num_tokens, limit=self.max_model_len)
