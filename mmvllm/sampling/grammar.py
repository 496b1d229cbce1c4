"""Grammars: which tokens may follow, so that a completion becomes what `SamplingParams.structured` asks for.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far and says for each token of the vocabulary
whether the text with it is still the beginning of one that the grammar describes.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mmvllm.errors import RequestError
from mmvllm.sampling.constraints import ConstraintFailed, clear_bits, empty_mask, set_bits
from mmvllm.sampling.grammar_matcher import AVOID_AMBIGUITY, compile_grammar, reason_of
from mmvllm.sampling.grammar_trial import GrammarTrial
from mmvllm.scheduler.detokenizer import special_ids
from mmvllm.scheduler.sequence import Sequence
from mmvllm.structured.grammar_cost import has_complement
from mmvllm.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 16  # grammars that are kept
MAX_REFUSED = 256
# CPU time of masks where grammars are not trusted: all requests of a step wait for them. Each mask of a request may
# take SECONDS_PER_TOKEN; time beyond that adds up to at most MAX_EXCESS_SECONDS, and is worked off by quicker masks.
# With the tokenizer of Qwen2-VL, a mask takes 13 ms at the first long string, later 1 ms, and 0.2 ms for presets.
MAX_EXCESS_SECONDS, SECONDS_PER_TOKEN = 0.3, 0.005
TOO_MANY = "items"  # in llguidance's errors about its parser, in which compiling again changes nothing


class MaskTime:
    """The CPU time beyond `SECONDS_PER_TOKEN` that the masks of a request have taken, for all of its completions."""

    def __init__(self) -> None:
        self.excess = 0.0  # without a lock: losing one of two times that are added at once is harmless

    def add(self, seconds: float) -> None:
        """Add the CPU time of one mask."""
        self.excess = max(0.0, self.excess + seconds - SECONDS_PER_TOKEN)


class GrammarConstraint:
    """The grammar of one sequence; see `mmvllm.scheduler.sequence.Constraint`."""

    depends_on_text = True

    def __init__(
        self, compiler: "GrammarCompiler", params: StructuredOutputsParams, compiled: "LLMatcher", mask_time: MaskTime
    ):
        self._compiler, self._params = compiler, params
        self._compiled, self._is_renewed = compiled, False
        self._matcher, self._num_consumed = compiled.deep_copy(), 0
        self._mask_time = mask_time
        self._mask = empty_mask(compiler.width)
        # A complement matches what llguidance marks control tokens with.
        self._has_complement = params.grammar is not None and has_complement(params.grammar)

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        """Clear the bits of tokens with which the text is no beginning of one that the grammar describes."""
        self._check_time()  # of earlier masks, also of the request's other completions
        self._advance(seq)
        if self._matcher.is_error() and not self._is_renewed and TOO_MANY not in self._matcher.get_error():
            # All copies of what is compiled share a lexer, whose states the texts of other requests may have used up.
            self._compiled, self._is_renewed = self._compiler.renewed(self._params, self._compiled), True
            self._matcher, self._num_consumed = self._compiled.deep_copy(), 0
            self._advance(seq)
        if self._matcher.is_error():
            raise _failed(reason_of(self._matcher.get_error()))
        if self._has_complement:
            clear_bits(self._mask, self._compiler.control_token_ids)
            if self._matcher.is_accepting():
                set_bits(self._mask, self._compiler.eos_token_ids)
        allowed &= self._mask[: len(allowed)]

    def _advance(self, seq: Sequence) -> None:
        """Compute the mask after the sequence's last token."""
        start = thread_time()
        matcher, first = self._matcher, seq.num_prompt_tokens + self._num_consumed
        for token_id in seq.token_ids[first:]:
            if not matcher.consume_token(token_id):
                break
            self._num_consumed += 1
        else:
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._mask_time.add(thread_time() - start)

    def _check_time(self) -> None:
        if self._mask_time.excess > MAX_EXCESS_SECONDS and not self._compiler.is_trusting:
            raise _failed(f"finding its tokens took {MAX_EXCESS_SECONDS:g} s more than it may; {AVOID_AMBIGUITY}")


def _failed(reason: str) -> ConstraintFailed:
    return ConstraintFailed(f"the grammar of structured failed: {reason}", param="structured")


class GrammarCompiler:
    """Compiles grammars for one model, and keeps some; safe for several threads.

    Args:
        tokenizer: its own fast tokenizer; what llguidance needs of it is made with the first grammar, in 1 to 2 s for
            150,000 tokens.
        eos_token_ids: all of them end a completion that is complete.
        vocab_size: width of the logits; tokens that the tokenizer does not have never follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int], vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.eos_token_ids = sorted(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.control_token_ids = sorted({*self.eos_token_ids, *special_ids(tokenizer)})
        # Of what is kept, and of making more: the engine's thread must not wait for another request's grammar.
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._ll_tokenizer: Any = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._refused: OrderedDict[StructuredOutputsParams, tuple[str, str | None]] = OrderedDict()
        self.is_trusting, self._is_closed = True, False
        self._trial: GrammarTrial | None = None

    @property
    def width(self) -> int:
        """The number of tokens in a mask, once there is a grammar."""
        return self._ll_tokenizer.vocab_size

    def distrust(self) -> None:
        """From now on, limit what grammars take; `close` ends the process that this needs.

        `check` compiles each in a process with limits first, and completions end whose masks take too long.
        """
        self.is_trusting = False

    def close(self) -> None:
        """End the process for grammars; another grammar is refused."""
        self._is_closed = True
        if self._trial is not None:
            self._trial.close()

    def constraint(self, params: StructuredOutputsParams, mask_time: MaskTime | None = None) -> GrammarConstraint:
        """A constraint for one sequence from its first token on; raises RequestError if it cannot be enforced.

        Sequences of a request share its `mask_time`.
        """
        return GrammarConstraint(self, params, self._matcher(params), mask_time or MaskTime())

    def check(self, params: StructuredOutputsParams | None, is_quick: bool = False) -> None:
        """Raise RequestError for what cannot be enforced, with the keyword or place; what can is compiled and kept.

        Raises `TakesLonger` for what `is_quick` leaves too little time, where grammars are not trusted.
        """
        if params is None or self.has(params):
            return
        if not self.is_trusting:
            self._check_apart(params, is_quick)
        self._matcher(params)

    def has(self, params: StructuredOutputsParams) -> bool:
        """Whether the grammar is compiled already."""
        return self._kept(params) is not None

    def renewed(self, params: StructuredOutputsParams, compiled: "LLMatcher") -> "LLMatcher":
        """Compile a grammar again, unless this was done for another sequence; waits for no other grammar."""
        matcher = self._kept(params)
        if matcher is None or matcher is compiled:
            matcher = self._compile(params)
            self._keep(params, matcher)
        return matcher

    def _check_apart(self, params: StructuredOutputsParams, is_quick: bool) -> None:
        with self._lock:
            refusal = self._refused.get(params)
        if refusal is not None:
            message, param = refusal
            raise RequestError(message, param=param)
        self._prepare()
        try:
            self._trial.check(params, is_quick)
        except RequestError as error:
            with self._lock:
                self._refused[params] = str(error), error.param
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise

    def _matcher(self, params: StructuredOutputsParams) -> "LLMatcher":
        matcher = self._kept(params)
        if matcher is None:
            self._prepare()
            with self._compiling:
                matcher = self._kept(params)
                if matcher is None:
                    matcher = self._compile(params)
                    self._keep(params, matcher)
        return matcher

    def _kept(self, params: StructuredOutputsParams) -> "LLMatcher | None":
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
            return self._compiled.get(params)

    def _keep(self, params: StructuredOutputsParams, matcher: "LLMatcher") -> None:
        with self._lock:
            self._compiled[params] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _prepare(self) -> None:
        """Make llguidance's tokenizer."""
        if self._ll_tokenizer is None:
            with self._compiling:
                if self._ll_tokenizer is None:
                    self._make_tokenizer()

    def _make_tokenizer(self) -> None:
        if find_spec("llguidance") is None:
            reason = "structured needs llguidance: pip install 'mmvllm[structured]'"
            raise RequestError(reason, param="structured")
        if not self.eos_token_ids:
            reason = "structured needs an end-of-sequence token, and this checkpoint has none"
            raise RequestError(reason, param="structured")
        from llguidance import LLTokenizer

        width = max(self._vocab_size, *(i + 1 for i in self._tokenizer.get_vocab().values()))
        description = _without_names_of_control_tokens(self._tokenizer)
        if not self.is_trusting:
            self._trial = GrammarTrial(description, width, self.eos_token_ids)
            if self._is_closed:
                self._trial.close()
        self._ll_tokenizer = LLTokenizer(description, n_vocab=width, eos_token=self.eos_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> "LLMatcher":
        return compile_grammar(self._ll_tokenizer, self.eos_token_ids, params)


def _without_names_of_control_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """The JSON of a fast tokenizer in which control tokens have names that no text contains.

    Where a grammar leaves only one text, "<|im_end|>" say, llguidance would write it with the control token.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"].get("vocab")
    for token in content["added_tokens"]:
        if token["special"]:
            name, token["content"] = token["content"], f"\ufdd0{token['content']}"
            if isinstance(vocabulary, dict) and name in vocabulary:
                vocabulary[token["content"]] = vocabulary.pop(name)
    return json.dumps(content | {"padding": None, "truncation": None, "post_processor": None})
