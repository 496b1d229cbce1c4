"""Prompts that cannot fit into the context, refused before time is spent on tokenizing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.errors import PromptTooLong


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The least number of tokens that a prompt has, whichever tokens its text is made of."""

    max_model_len: int
    max_token_length: int  # in characters

    @classmethod
    def of(cls, tokenizer: Any, max_model_len: int) -> "LengthLimit":
        return cls(max_model_len, max(map(len, tokenizer.get_vocab())))

    def cut(self, text: str, num_tokens: int, side: str) -> str:
        """Cut a text at one side, so that it still has more than this many tokens, or too many, or is whole."""
        length = (min(num_tokens, self.max_model_len) + 1) * self.max_token_length
        return text[:length] if side == "right" else text[-length:]

    def check(self, prompt: str | Sequence[int], num_extra_tokens: int = 0) -> None:
        """Raise PromptTooLong for a text or token ids that, with the extra tokens, leave no room for a completion."""
        length = -(-len(prompt) // self.max_token_length) if isinstance(prompt, str) else len(prompt)
        num_tokens = length + num_extra_tokens
        if num_tokens >= self.max_model_len:
            problem = f"the prompt has at least {num_tokens} tokens"
            raise PromptTooLong(problem, "shorten it", value=num_tokens, limit=self.max_model_len)
