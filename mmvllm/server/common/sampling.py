"""Converts the sampling fields of a request to `SamplingParams`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.sampling_params import CHOSEN_AT_END, SamplingParams, with_defaults
from mmvllm.server.common.protocol import SamplingRequest
from mmvllm.server.common.structured import StructuredField, structured_field
from mmvllm.server.errors import ApiError

PARAMS_OF_BOTH_APIS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"),
    *("n", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "stop_on_repetition", "prompt_logprobs"),
    "logprob_token_ids",
    *("skip_special_tokens", "include_stop_str_in_output"),
    *("best_of", "beam_width", "length_penalty", "early_stopping"),
)
# The engine samples greedily by default. Its other defaults equal OpenAI's.
OPENAI_DEFAULTS = MappingProxyType({"temperature": 1.0})


def sampling_params(
    body: SamplingRequest,
    defaults: Mapping[str, Any],
    max_tokens: int,
    logprobs: int | None,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """Return the sampling parameters of a request, with `defaults` for fields that are omitted or null.

    `own` has additional parameters that the route derives from its fields. Raises ApiError for invalid values.
    """
    given = {name: value for name in PARAMS_OF_BOTH_APIS if (value := getattr(body, name)) is not None}
    if body.logprob_token_ids:
        logprobs = 0  # in place of the most likely tokens, as in vLLM
    _set_beam_width(given, body.use_beam_search)
    if "beam_width" in given and own:  # beam search has no log-probabilities of prompts
        if logprobs is not None:
            message = "echo with logprobs cannot be used with beam search; leave one of them out"
            raise ApiError(400, message, param="echo")
        own = {}
    field = StructuredField({}, {})
    try:
        field = structured_field(body)
        own = {**own, "structured": field.params(), "max_tokens": max_tokens, "logprobs": logprobs}
        params = SamplingParams(**with_defaults(given | own, defaults))
    except RequestError as error:  # for rules that the schema of the request cannot express
        message, param = field.format_error(error) or (str(error), error.param)
        raise ApiError(400, message, param=param) from None
    if body.stream and params.chooses_at_end:
        raise ApiError(400, f"stream is true, {CHOSEN_AT_END}", param="stream")
    return params


def _set_beam_width(given: dict[str, Any], use_beam_search: bool | None) -> None:
    if use_beam_search:  # as in vLLM, the width is best_of (in earlier versions) or n
        given["beam_width"] = given.get("beam_width") or given.pop("best_of", None) or given.get("n", 1)
    elif use_beam_search is False and "beam_width" in given:
        message = f"beam_width is {given['beam_width']}, but use_beam_search is false; leave one of them out"
        raise ApiError(400, message, param="beam_width")
