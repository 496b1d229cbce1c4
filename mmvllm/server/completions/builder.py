"""Builds the responses of /v1/completions, whole or in chunks, from the engine's deltas."""

import codecs
from collections.abc import Sequence
from typing import Any

from mmvllm.outputs import Delta, LogprobsById, RequestOutput
from mmvllm.scheduler.detokenizer import special_ids, token_bytes
from mmvllm.server.common.response_builder import (
    FINISH_REASONS,
    NO_LOGPROB,
    ChoiceBuffer,
    ResponseBuilder,
    token_name,
    top_of,
)
from mmvllm.server.common.response_models import Usage
from mmvllm.server.completions.protocol import Completion


class CompletionResponseBuilder(ResponseBuilder):
    """Builds the response to one request of /v1/completions."""

    kind, chunk_kind, id_prefix, prompt_field = "text_completion", "text_completion", "cmpl", "prompt"

    def __init__(self, *args: Any, echoes: bool = False, skips_special: bool = True, **shown: Any):
        """Show what the base class shows; `echoes` adds the prompt before texts and log-probabilities.

        `skips_special` leaves special tokens out of texts.
        """
        super().__init__(*args, **shown)
        self._echoes = echoes
        self._offsets: dict[int, _OffsetCounter] = {}  # by choice
        self._special_ids = special_ids(self._tokenizer) if skips_special else frozenset()
        self._begun: set[int] = set()  # choices that have a chunk

    @property
    def _num_per_prompt_token(self) -> int:
        num_echoed = 0 if self._top_logprobs is None or not self._echoes else 1 + self._top_logprobs
        return num_echoed + super()._num_per_prompt_token

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> Completion:
        """Return the response to a request that is not streamed."""
        made = [
            {
                "index": choice.index,
                "text": self._echo(choice.output) + "".join(choice.text),
                "logprobs": self._logprobs(choice.index, choice.logprobs, choice.output),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._of_prompt(choice.output),
                **self._token_ids(choice.token_ids),
            }
            for choice in choices
        ]
        return Completion(**self._head, choices=made, usage=usage, **self._times())

    def first_chunks(self, _num_choices: int, _delta: Delta) -> list[dict]:
        """Return no chunks: a completion stream starts with the first text."""
        return []

    def chunks(self, index: int, delta: Delta) -> list[dict]:
        """Return the chunk for new tokens of a choice; its first chunk has the prompt, if the response shows it."""
        prompt = None if index in self._begun else delta
        self._begun.add(index)
        choice = {
            "index": index,
            "text": self._echo(prompt) + delta.text,
            "logprobs": self._logprobs(index, delta.logprobs or [], prompt),
            "finish_reason": FINISH_REASONS[delta.finish_reason],
            "stop_reason": delta.stop_reason,
        }
        prompt_ids = {} if prompt is None else self._prompt_token_ids(prompt.prompt_token_ids)
        return [self._chunk(choice | prompt_ids | self._token_ids(delta.token_ids))]

    def _echo(self, prompt: RequestOutput | Delta | None) -> str:
        """Return the prompt's text if it is echoed and `prompt` is given, else an empty string."""
        if not self._echoes or prompt is None:
            return ""
        data = (token_bytes(self._tokenizer, token_id) for token_id in prompt.prompt_token_ids)
        return b"".join(data).decode(errors="replace")

    def _prompt_entries(self, output: RequestOutput | Delta) -> dict:
        """Return the log-probabilities of an echoed prompt; its first token has none, and special tokens are text."""
        ids, found, offset = output.prompt_token_ids, output.prompt_logprobs, _OffsetCounter(frozenset())
        own = [None if entry is None else entry[token_id] for token_id, entry in zip(ids, found, strict=True)]
        return {
            "tokens": [self._name_of(token_id) for token_id in ids],
            "token_logprobs": [None if logprob is None else max(logprob, NO_LOGPROB) for logprob in own],
            "top_logprobs": [None if entry is None else self._top_by_text(entry) for entry in found],
            "text_offset": [offset.advance(token_id, token_bytes(self._tokenizer, token_id)) for token_id in ids],
        }

    def _logprobs(
        self, index: int, entries: Sequence[LogprobsById], prompt: RequestOutput | Delta | None
    ) -> dict | None:
        if self._top_logprobs is None:
            return None
        echo = self._echo(prompt)
        offset = self._offsets.setdefault(index, _OffsetCounter(self._special_ids, len(echo)))
        sampled = [(next(iter(entry)), entry) for entry in entries]
        made = {
            "tokens": [self._name_of(token_id) for token_id, _ in sampled],
            "token_logprobs": [max(entry[token_id], NO_LOGPROB) for token_id, entry in sampled],
            "top_logprobs": [self._top_by_text(entry) for entry in entries],
            "text_offset": [
                offset.advance(token_id, token_bytes(self._tokenizer, token_id)) for token_id, _ in sampled
            ],
        }
        if not echo:
            return made
        echoed = self._prompt_entries(prompt)
        return {name: echoed[name] + made[name] for name in made}

    def _top_by_text(self, logprobs: LogprobsById) -> dict[str, float]:
        """Map names of tokens to log-probabilities: the token itself first, then the most likely ones.

        If several tokens have the same name, it gets the highest of their log-probabilities.
        """
        own = next(iter(logprobs.items()))
        made: dict[str, float] = {}
        for token_id, logprob in [own, *top_of(logprobs, self._top_logprobs)]:
            name = self._name_of(token_id)
            made[name] = max(logprob, made.get(name, NO_LOGPROB))
        return made

    def _name_of(self, token_id: int) -> str:
        return token_name(token_id, token_bytes(self._tokenizer, token_id), self._names_by_id)


class _OffsetCounter:
    """Computes the offset in characters of each token of a completion; special tokens contribute no text."""

    def __init__(self, special_ids: frozenset[int], start: int = 0):
        self._decoder, self._special_ids = codecs.getincrementaldecoder("utf-8")("replace"), special_ids
        self._at = start

    def advance(self, token_id: int, data: bytes) -> int:
        before = self._at
        if token_id not in self._special_ids:
            self._at += len(self._decoder.decode(data))
        return before
