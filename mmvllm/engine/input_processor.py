"""Turns requests into sequence groups, and refuses requests that can never run."""

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from mmvllm.config import ModelConfig
from mmvllm.errors import ParameterError, PromptTooLong, RequestError
from mmvllm.inputs import EngineInput, MediaRules
from mmvllm.lora.adapters import Adapter
from mmvllm.pooling_params import PoolingParams
from mmvllm.processors.chat.processor import tokenize
from mmvllm.processors.tensors import input_from_tensors, own_token_ids
from mmvllm.sampling.constraints import ConstraintFactory, check_in_vocabulary
from mmvllm.sampling.grammar import GrammarCompiler, MaskTime
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.beam_search import BeamSearch
from mmvllm.scheduler.beams import Beams
from mmvllm.scheduler.detokenizer import CompletionText
from mmvllm.scheduler.encoder_cache import EncoderCache
from mmvllm.scheduler.prompt_logprobs import PoolingState, PromptLogprobs, PromptOutputs
from mmvllm.scheduler.sequence import Sequence, SequenceGroup
from mmvllm.utils.arguments import are_ints
from mmvllm.utils.text import shown

Prompt = Any  # a string, token ids as a list, array or tensor, or an EngineInput


class InputProcessor:
    """Checks requests for one model and creates their sequences; `seed` is used for requests without a seed."""

    def __init__(
        self,
        config: ModelConfig,
        rules: MediaRules | None,
        tokenizer: PreTrainedTokenizerBase,
        encoder_cache: EncoderCache,
        grammars: GrammarCompiler,
        eos_token_ids: frozenset[int],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        seed: int,
    ):
        self._config, self._rules, self._tokenizer = config, rules, tokenizer
        self._eos_token_ids, self._max_num_seqs = eos_token_ids, max_num_seqs
        self._max_model_len, self._block_size = max_model_len, block_size
        self._encoder_cache, self._grammars, self._seed = encoder_cache, grammars, seed
        self._unseeded = count()
        self._constraints = ConstraintFactory(tokenizer, config.vocab_size)

    def go_on_from(self, other: "InputProcessor") -> None:
        """Continue the other processor's series of seeds for requests without one, and share its grammars."""
        self._unseeded, self._grammars = other._unseeded, other._grammars

    def engine_input(
        self, prompt: Prompt, pixel_values: Any = None, image_grid_thw: Any = None, **tensors: Any
    ) -> EngineInput:
        """Build the input of a prompt; `processors.tensors.input_from_tensors` describes the tensors."""
        tensors |= {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        if isinstance(prompt, EngineInput):
            if given := [name for name, value in tensors.items() if value is not None]:
                raise RequestError(f"{', '.join(given)} came with an EngineInput, which has its own media items")
            return prompt
        token_ids = tokenize(self._tokenizer, prompt) if isinstance(prompt, str) else own_token_ids(prompt)
        return input_from_tensors(self._rules, token_ids, **tensors)

    def warmup_input(self) -> EngineInput:
        """Return a short prompt, with an image if the model takes images."""
        token_ids = [0] * max(1, min(16, self._max_model_len - 2))
        rules = self._rules
        if rules is None or len(token_ids) < 4 or not self._encoder_cache.fits(4):
            return self.engine_input(token_ids)
        side = 2 * rules.merge_size
        token_ids[:4] = [rules.image_token_id] * 4
        pixel_values = torch.zeros(side * side, rules.patch_dim, dtype=torch.uint8)
        return self.engine_input(token_ids, pixel_values=pixel_values, image_grid_thw=[(1, side, side)])

    def group(
        self,
        prompt: EngineInput,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int,
        cache_salt: str | None,
        arrival_time: float | None,
        trace_headers: Mapping[str, str] | None,
        pooling: PoolingParams | None = None,
        prompt_logprobs_from: int = 1,
        adapter: Adapter | None = None,
    ) -> SequenceGroup:
        """Create the sequences of a request; raise RequestError for a request that can never run."""
        _check_types(
            sampling_params=(params, SamplingParams),
            request_id=(request_id, str | None),
            cache_salt=(cache_salt, str | None),
            priority=(priority, int),
            arrival_time=(arrival_time, float | int | None),
            trace_headers=(trace_headers or {}, Mapping),
            pooling=(pooling, PoolingParams | None),
            prompt_logprobs_from=(prompt_logprobs_from, int),
        )
        self._check_token_ids(prompt.token_ids)
        self._check_pooling(pooling, params)
        self._check_fits(prompt, generates=pooling is None and params.max_tokens > 0)
        self._check_beam_width(params)
        self._check_can_go_on(params)
        for name in ("logit_bias", "logprob_token_ids"):
            check_in_vocabulary(name, getattr(params, name) or (), self._config.vocab_size)
        prompt_outputs = self._prompt_outputs(prompt, params, pooling, prompt_logprobs_from)
        seed = f"{self._seed}:{next(self._unseeded)}" if params.seed is None else str(params.seed)
        arrival_time = time.time() if arrival_time is None else arrival_time
        items = prompt.mm_items
        if adapter is not None and adapter.adapts_vision:
            items = tuple(replace(item, digest=adapter.item_digest(item.digest)) for item in items)
        seqs, mask_time = [], MaskTime()
        for i in range(params.num_seqs):
            constraints = self._constraints.constraints_of(params)
            if params.structured is not None:
                constraints += (self._grammars.constraint(params.structured, mask_time),)
            depends_on_text = params.logits_processors or any(own.depends_on_text for own in constraints)
            seq = Sequence(
                prompt.token_ids,
                params,
                request_id=request_id,
                block_size=self._block_size,
                mm_items=items,
                positions=prompt.positions,
                mrope_position_delta=prompt.position_delta,
                max_num_tokens=self._max_num_tokens(prompt, params, pooling),
                seed=xxhash.xxh64_intdigest(f"{seed}:{i}".encode()),
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival_time,
                completion_text=self._completion_text(params),
                adapter=adapter,
                constraints=constraints,
                waits_for_tokens=bool(depends_on_text),
                prompt_outputs=None if i else prompt_outputs,  # only for the sequence that computes the prompt
            )
            seqs.append(seq)
        return SequenceGroup(seqs, trace_headers, prompt.preparation, prompt.text, beams=self._beams(params, seqs))

    def _completion_text(self, params: SamplingParams) -> CompletionText | None:
        """Return the text in which stop strings are searched, or None without stop strings."""
        return CompletionText(self._tokenizer, params.stop, params.skip_special_tokens) if params.stop else None

    def _beams(self, params: SamplingParams, seqs: list[Sequence]) -> Beams | None:
        if params.beam_width is None:
            return None
        search = BeamSearch(
            params.beam_width,
            max_length=seqs[0].max_num_tokens - seqs[0].num_prompt_tokens,
            end_ids=params.end_ids(self._eos_token_ids),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            keeps_candidates=params.logprobs is not None,
        )
        return Beams(search, seqs)

    def _check_pooling(self, pooling: PoolingParams | None, params: SamplingParams) -> None:
        if pooling is not None:
            pooling.check_dimensions(self._config.hidden_size)
            if replace(params, seed=None) != SamplingParams():  # with several engines, every request has a seed
                message = "an embedding is not sampled; leave sampling_params out"
                raise RequestError(message, param="sampling_params", value=params)

    def _prompt_outputs(
        self, prompt: EngineInput, params: SamplingParams, pooling: PoolingParams | None, first: int
    ) -> PromptOutputs | None:
        """Return the state of the outputs requested for the prompt; log-probabilities begin at token `first`."""
        num_tokens = len(prompt.token_ids)
        if pooling is not None:
            return PoolingState.of(pooling, num_tokens)
        if params.prompt_logprobs is None:
            return None
        if not 1 <= first <= num_tokens:
            raise ParameterError("prompt_logprobs_from", first, f"in [1, {num_tokens}], tokens of the prompt")
        return PromptLogprobs(first - 1, num_tokens - 1, min(params.prompt_logprobs, self._config.vocab_size))

    def _max_num_tokens(self, prompt: EngineInput, params: SamplingParams, pooling: PoolingParams | None) -> int:
        """Return the maximum length of prompt and completion; the checkpoint's limit applies unless `ignore_eos`."""
        if pooling is not None:
            return len(prompt.token_ids)
        limit = self._config.max_new_tokens
        if limit is None or params.ignore_eos:
            return self._max_model_len
        return min(self._max_model_len, len(prompt.token_ids) + limit)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("prompt is empty; it needs at least one token")
        vocab_size = self._config.vocab_size
        if are_ints(token_ids) and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token ids of a prompt must be integers in [0, {vocab_size}), got {shown(token_id)}"
                )

    def _check_can_go_on(self, params: SamplingParams) -> None:
        """Refuse `min_tokens` if every allowed token ends the completion, which may not end before `min_tokens`."""
        allowed = range(self._config.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if params.min_tokens and params.end_ids(self._eos_token_ids).issuperset(allowed):
            reason = f"is {params.min_tokens}, but every token that is allowed ends the completion; lower it"
            raise RequestError(f"min_tokens {reason}", param="min_tokens", value=params.min_tokens, limit=0)

    def _check_beam_width(self, params: SamplingParams) -> None:
        width = params.beam_width or 0
        if width > self._max_num_seqs:
            reason = f"beam_width is {width}, max_num_seqs is {self._max_num_seqs}; lower it or raise max_num_seqs"
            raise RequestError(reason, param="beam_width", value=width, limit=self._max_num_seqs)
        limit = self._config.vocab_size - len(params.end_ids(self._eos_token_ids))
        if width > limit:
            raise RequestError(
                f"beam_width is {width}, but only {limit} tokens can follow",
                param="beam_width",
                value=width,
                limit=limit,
            )

    def _check_fits(self, prompt: EngineInput, generates: bool) -> None:
        num_tokens, num_media_tokens = len(prompt.token_ids), prompt.num_media_tokens
        if num_tokens + generates > self._max_model_len:
            kinds = " and ".join(f"{name}s" for name in sorted({item.modality for item in prompt.mm_items}))
            of_media = f" ({num_media_tokens} of them from {kinds})" if num_media_tokens else ""
            lower = f", lower {'fps, num_frames or ' if 'videos' in kinds else ''}max_pixels" if of_media else ""
            raise PromptTooLong(
                f"prompt has {num_tokens} tokens{of_media}{' and the completion at least one' if generates else ''}",
                f"shorten it{lower} or raise max_model_len",
                value=num_tokens,
                limit=self._max_model_len,
            )
        cache = self._encoder_cache
        for item in prompt.mm_items:
            if not cache.fits(item.num_tokens):
                needed = item.num_tokens * cache.bytes_per_embed
                raise RequestError(
                    f"{'' if item.modality == 'image' else 'a temporal patch '}has {item.num_tokens} tokens, which "
                    f"take {needed} bytes of the encoder cache; encoder_cache_bytes is {cache.capacity_bytes}; "
                    "raise it or lower max_pixels",
                    **{f"{item.modality}_index": item.index},
                    value=needed,
                    limit=cache.capacity_bytes,
                )


def _check_types(**given: tuple[Any, Any]) -> None:
    """Raise ParameterError for a value of another type; arguments are (value, type or union of types) pairs."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise ParameterError(name, value, str(getattr(kind, "__name__", kind)))
