"""Grammars: which tokens may follow, so that a completion becomes what `SamplingParams.structured` asks for.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far and says for each token of the vocabulary
whether the text with it is still the beginning of one that the grammar describes.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mmvllm.engine.constraints import ConstraintFailed
from mmvllm.engine.grammar_matcher import compile_grammar, first_line
from mmvllm.engine.grammar_trial import GrammarTrial
from mmvllm.engine.sequence import Sequence
from mmvllm.errors import RequestError
from mmvllm.structured import StructuredOutputsParams

MAX_COMPILED = 32  # grammars that are kept


class GrammarConstraint:
    """The grammar of one sequence; see `mmvllm.engine.constraints.Constraint`."""

    depends_on_text = True

    def __init__(self, matcher: Any, width: int):
        self._matcher, self._num_consumed = matcher, 0
        self._mask = np.empty(-(-width // 32), np.uint32)

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        """Clear the bits of tokens with which the text is no beginning of one that the grammar describes."""
        matcher, first = self._matcher, seq.num_prompt_tokens + self._num_consumed
        for token_id in seq.token_ids[first:]:
            self._check(matcher.consume_token(token_id))
            self._num_consumed += 1
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check(not matcher.is_error())
        allowed &= self._mask[: len(allowed)]

    def _check(self, is_good: bool) -> None:
        if not is_good:
            reason = f"the grammar of structured failed: {first_line(self._matcher.get_error())}"
            raise ConstraintFailed(reason, param="structured")


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
        # Of what is kept, and of making more: the engine's thread must not wait for another request's grammar.
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._ll_tokenizer: Any = None
        self._compiled: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._is_trusting = True
        self._trial: GrammarTrial | None = None

    def distrust(self) -> None:
        """From now on, compile each grammar in a process with limits first; `close` ends the process."""
        self._is_trusting = False

    def close(self) -> None:
        """End the process for grammars; another grammar is refused."""
        if self._trial is not None:
            self._trial.close()

    def constraint(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """A constraint for one sequence from its first token on; raises RequestError if it cannot be enforced."""
        return GrammarConstraint(self._matcher(params).deep_copy(), self._ll_tokenizer.vocab_size)

    def check(self, params: StructuredOutputsParams | None) -> None:
        """Raise RequestError for what cannot be enforced, with the keyword or place; what can is compiled and kept."""
        if params is not None:
            self._matcher(params)

    def has(self, params: StructuredOutputsParams) -> bool:
        """Whether the grammar is compiled already."""
        return self._kept(params) is not None

    def _matcher(self, params: StructuredOutputsParams) -> Any:
        matcher = self._kept(params)
        if matcher is None:
            with self._compiling:
                matcher = self._kept(params)
                if matcher is None:
                    self._prepare()
                    matcher = self._compile(params)
                    self._keep(params, matcher)
        return matcher

    def _kept(self, params: StructuredOutputsParams) -> Any | None:
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
            return self._compiled.get(params)

    def _keep(self, params: StructuredOutputsParams, matcher: Any) -> None:
        with self._lock:
            self._compiled[params] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _prepare(self) -> None:
        """Make llguidance's tokenizer."""
        if self._ll_tokenizer is not None:
            return
        if find_spec("llguidance") is None:
            reason = "structured needs llguidance: pip install 'mmvllm[structured]'"
            raise RequestError(reason, param="structured")
        if not self.eos_token_ids:
            reason = "structured needs an end-of-sequence token, and this checkpoint has none"
            raise RequestError(reason, param="structured")
        from llguidance import LLTokenizer

        width = max(self._vocab_size, *(i + 1 for i in self._tokenizer.get_vocab().values()))
        description = _without_names_of_control_tokens(self._tokenizer)
        if not self._is_trusting:
            self._trial = GrammarTrial(description, width, self.eos_token_ids)
        self._ll_tokenizer = LLTokenizer(description, n_vocab=width, eos_token=self.eos_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        if self._trial is not None:
            self._trial.check(params)
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
