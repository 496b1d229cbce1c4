"""Refuse prompts that cannot fit into the context before time is spent on tokenizing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmvllm.errors import PromptTooLong


class Truncation(NamedTuple):
    """How a prompt is truncated: `side` "left" keeps its last `num_tokens` tokens, "right" keeps its first ones."""

    num_tokens: int
    side: str = "left"

    def cut(self, content: Any, length: int | None = None) -> Any:
        """Cut token ids to `num_tokens`, or a text to `length` characters."""
        length = self.num_tokens if length is None else length
        return content[:length] if self.side == "right" else content[-length:]


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Checks prompts by the least number of tokens that a text can have, given the longest token."""

    max_model_len: int
    max_token_length: int  # in characters

    @classmethod
    def of(cls, tokenizer: Any, max_model_len: int) -> "LengthLimit":
        return cls(max_model_len, max(map(len, tokenizer.get_vocab())))

    def cut(self, text: str, truncation: Truncation) -> str:
        """Shorten a text before it is tokenized; unless whole, it still exceeds the truncation or the context."""
        num_tokens = min(truncation.num_tokens, self.max_model_len) + 1
        return truncation.cut(text, num_tokens * self.max_token_length)

    def check(self, prompt: str | Sequence[int], room: int = 1) -> None:
        """Raise PromptTooLong for a text or token ids that leave no `room` for a completion."""
        if isinstance(prompt, str):
            return self.check_characters(len(prompt), room=room)
        self._check_tokens(len(prompt), room)

    def check_characters(self, number: int, num_extra_tokens: int = 0, room: int = 1) -> None:
        """Raise PromptTooLong like `check`, for a text of `number` characters and some extra tokens."""
        self._check_tokens(-(-number // self.max_token_length) + num_extra_tokens, room)

    def _check_tokens(self, num_tokens: int, room: int) -> None:
        if num_tokens + room > self.max_model_len:
            problem = f"the prompt has at least {num_tokens} tokens"
            raise PromptTooLong(problem, "shorten it", value=num_tokens, limit=self.max_model_len)
