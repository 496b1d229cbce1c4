"""Computes log-probabilities of given continuations of a prompt, which share the prompt's KV."""

from collections import defaultdict
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from mmvllm.entrypoints.request_queue import PreparedRequest, request_options
from mmvllm.entrypoints.request_stream import EngineRequest, Key
from mmvllm.errors import RequestError, RequestsAborted
from mmvllm.inputs import MediaRules, continued
from mmvllm.outputs import ContinuationScore, RequestOutput, ScoreOutput
from mmvllm.processors.chat.processor import tokenize
from mmvllm.sampling_params import SamplingParams
from mmvllm.utils.text import counted, shown

PARAMS = SamplingParams(max_tokens=0, prompt_logprobs=0)


class Scores:
    """The scores of one `LLM.score` call. A request's first continuation computes the prompt; the others follow it.

    Args:
        continuations: token ids of each continuation of each request.
    """

    def __init__(self, continuations: Sequence[list[list[int]]]):
        self._continuations = continuations
        self._scores: defaultdict[int, dict[int, ContinuationScore]] = defaultdict(dict)  # by request

    def plan(self, item: PreparedRequest) -> list[EngineRequest]:
        """Return an engine request for each continuation."""
        own = item.request if isinstance(item.request, dict) else {}
        if (name := next((name for name in ("sampling_params", "request_id") if own.get(name)), None)) is not None:
            raise RequestError(f"{name} has no meaning for a score; leave it out", param=name, value=own[name])
        prompt = item.engine_input()
        if not prompt.token_ids:  # checked here, since a continuation follows it
            raise RequestError("prompt is empty; it needs at least one token")
        options = request_options(own) | {"prompt_logprobs_from": len(prompt.token_ids)}
        return [EngineRequest(continued(prompt, one), PARAMS, options) for one in self._continuations[item.index]]

    def add(self, key: Key, output: RequestOutput) -> ScoreOutput | None:
        """Add the output of a continuation; return the request's output with its last one, else None.

        Raises RequestsAborted.
        """
        request, index = key
        if output.finish_reason == "aborted":
            raise RequestsAborted(f"request {request}, continuation {index}: aborted", [output])
        token_ids = self._continuations[request][index]
        self._scores[request][index] = _score(token_ids, output)
        if len(self._scores[request]) < len(self._continuations[request]):
            return None
        scores = [score for _, score in sorted(self._scores.pop(request).items())]
        length = output.num_prompt_tokens - len(token_ids)
        return ScoreOutput(scores, length, output.num_image_tokens, output.num_video_tokens)


def _score(token_ids: list[int], output: RequestOutput) -> ContinuationScore:
    of_tokens = output.prompt_logprobs[-len(token_ids) :]
    found = [logprobs[token_id] for logprobs, token_id in zip(of_tokens, token_ids, strict=True)]
    logprobs = [logprob.logprob for logprob in found]
    return ContinuationScore(token_ids, logprobs, sum(logprobs), all(logprob.rank == 1 for logprob in found))


class ContinuationReader:
    """Parses the `continuations` of `LLM.score`; its RequestErrors name the position of a bad continuation."""

    def __init__(self, tokenizer: Any, rules: MediaRules | None, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._placeholders = set() if rules is None else {rules.image_token_id, rules.video_token_id}

    def read(self, continuations: Any, num_requests: int) -> list[list[list[int]]]:
        """Return the token ids of each request's continuations."""
        if isinstance(continuations, str) or not isinstance(continuations, Sequence) or not continuations:
            raise _error("continuations must be a list of strings or token ids, or such a list for each request")
        if _is_one(continuations[0]):
            return [self._list(continuations, "continuations")] * num_requests
        if len(continuations) != num_requests:
            given = f"{counted(len(continuations), 'list')} for {counted(num_requests, 'request')}"
            raise _error(f"continuations has {given}; give one for each request, or one list of strings for all")
        return [self._list(own, f"continuations[{i}]") for i, own in enumerate(continuations)]

    def _list(self, own: Any, path: str) -> list[list[int]]:
        if isinstance(own, str | bytes) or not isinstance(own, Sequence) or not own:
            raise _error(f"{path} must be a list of at least one string or list of token ids")
        return [self._token_ids(one, f"{path}[{i}]") for i, one in enumerate(own)]

    def _token_ids(self, one: Any, path: str) -> list[int]:
        if not isinstance(one, str) and not _is_one(one):
            raise _error(f"{path} must be a string or a list of token ids, and not empty, got {shown(one, 100)}")
        token_ids = tokenize(self._tokenizer, one) if isinstance(one, str) else [int(token_id) for token_id in one]
        if not token_ids:
            raise _error(f"{path} is empty; it needs at least one token")
        if self._placeholders & {*token_ids}:
            raise _error(f"{path} has the placeholder of an image or a video; put these into the request")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise _error(f"{path} has token ids outside [0, {self._vocab_size})")
        return token_ids


def _is_one(continuation: Any) -> bool:
    """Return whether the value is a single continuation."""
    if isinstance(continuation, str):
        return True
    is_list = isinstance(continuation, Sequence) and not isinstance(continuation, bytes) and bool(continuation)
    return is_list and all(isinstance(one, Integral) and not isinstance(one, bool) for one in continuation)


def _error(reason: str) -> RequestError:
    return RequestError(reason, param="continuations")
