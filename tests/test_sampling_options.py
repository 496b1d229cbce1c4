"""Every field of `SamplingParams` is everywhere it belongs; a failure names the place and the file that lack one.

A new field belongs everywhere, unless a table below names it with the reason why not.
"""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from mmvllm import SamplingParams
from mmvllm.cli import caption
from mmvllm.demo.conversation import Options
from mmvllm.engine.llm_engine import WARMUP_PARAMS
from mmvllm.sampling.sampling_states import SamplingStates
from mmvllm.scheduler.sequence import Sequence
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.chat.serving import chat_params
from mmvllm.server.completions.protocol import CompletionRequest
from mmvllm.server.completions.serving import completion_params
from tests.helpers.serving.server import chat, completion

DEFAULTS = SamplingParams()
FIELDS = [field.name for field in fields(SamplingParams)]
VALUES = (
    0.5,
    1,
    2,
    3,
    True,
    False,
    "x",
    {1: 2.0},
    [len],
    {"json_object": True},
)  # the first that a field accepts and that is not its default is tried
DOCUMENTS = Path(__file__).parents[1] / "docs"
GUIDE = 'docs/extending.md, "A sampling option", has the whole list'

BEAMS = ("beam_width", "length_penalty", "early_stopping")
# What a value needs beside itself; beam search is not sampled.
BESIDE = {
    "logprob_token_ids": {"logprobs": 0},
    "beam_width": {},
    "length_penalty": {"beam_width": 2},
    "early_stopping": {"beam_width": 2},
}
FOR_CALLERS = "is for the caller's own code"
ENDS = "decided in the engine, from the tokens that were chosen"
NOT_DRAWN = {
    "max_tokens": ENDS,
    "min_tokens": "SamplingStates.forbidden",
    "stop": ENDS,
    "stop_token_ids": ENDS,
    "ignore_eos": ENDS,
    "stop_on_repetition": ENDS,
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), "of the text, which is made of the tokens"),
    "seed": "the seeds of sequences are made from it",
    **dict.fromkeys(("logprobs", "logprob_token_ids"), "sampler.Logprobs"),
    "prompt_logprobs": "read while the prompt is computed",
    "n": "sequences of the engine",
    "logit_bias": "SamplingStates.biases",
    **dict.fromkeys(("allowed_token_ids", "bad_words", "no_repeat_ngram_size"), "sampling/constraints.py"),
    "logits_processors": "sampling/constraints.py",
    "detokenize": "of the text, which is made of the tokens",
    "extra_args": FOR_CALLERS,
    "structured": "sampling/grammar.py",
    "best_of": "engine/output_processor.py",
    **dict.fromkeys(BEAMS, "scheduler/beam_search.py"),
}
NOT_WARMED_UP = {
    **dict.fromkeys(("stop", "stop_token_ids", "stop_on_repetition", "n", "best_of"), "takes no path of the sampler"),
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), "takes no path of the sampler"),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), "takes the path of no_repeat_ngram_size"),
    "structured": "takes the path of no_repeat_ngram_size",
    "logits_processors": "are the caller's own functions",
    "detokenize": "takes no path of the sampler",
    "extra_args": FOR_CALLERS,
    "logprob_token_ids": "runs the same kernels as logprobs",
    **dict.fromkeys(BEAMS, "its path has no kernels but the others'"),
}
OTHER_NAMES = {"structured": "structured_outputs"}  # in vLLM's server
NOT_OVER_HTTP = {
    "logits_processors": "functions cannot be sent",
    "detokenize": "responses have texts",
    "extra_args": FOR_CALLERS,
}
NOT_IN_CHATS = NOT_OVER_HTTP | {
    "logprobs": "chats have logprobs: true, and top_logprobs for the number",
    "logprob_token_ids": "needs logprobs: true in chats",
}
FOR_CAPTIONS = "captions are greedy, or sampled at a temperature from the whole distribution"
ONE_CAPTION = "an image has one caption, which ends where the model ends it"
NOT_ON_THE_COMMAND_LINE = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), FOR_CAPTIONS),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), FOR_CAPTIONS),
    **dict.fromkeys(("min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "best_of"), ONE_CAPTION),
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), ONE_CAPTION),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"), FOR_CAPTIONS),
    "logits_processors": FOR_CAPTIONS,
    "detokenize": "captions are texts",
    "extra_args": FOR_CALLERS,
    "structured": "--schema makes it",
    **dict.fromkeys(BEAMS[1:], "captions have the defaults of beam search"),
    **dict.fromkeys(("logprobs", "logprob_token_ids", "prompt_logprobs"), "records have no column for them"),
}
FEW_CONTROLS = "the page has few controls"
NOT_ON_THE_PAGE = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), FEW_CONTROLS),
    **dict.fromkeys(("min_tokens", "stop", "stop_token_ids", "ignore_eos", "n"), FEW_CONTROLS),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"), FEW_CONTROLS),
    "logits_processors": FEW_CONTROLS,
    "detokenize": "answers are texts",
    "extra_args": FOR_CALLERS,
    "structured": FEW_CONTROLS,
    "stop_on_repetition": FEW_CONTROLS,
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), FEW_CONTROLS),
    **dict.fromkeys(("logprobs", "logprob_token_ids", "prompt_logprobs"), FEW_CONTROLS),
    **dict.fromkeys(("best_of", *BEAMS), "the page shows an answer while it is generated"),
}
EXCEPTIONS = [NOT_DRAWN, NOT_WARMED_UP, NOT_OVER_HTTP, NOT_IN_CHATS, NOT_ON_THE_COMMAND_LINE, NOT_ON_THE_PAGE]


def missing(name: str, file: str, what: str, exceptions: str | None = None) -> str:
    why_not = f", or to {exceptions} in tests/test_sampling_options.py with the reason why not" if exceptions else ""
    return f"{name} is missing in {file}: add it to {what}{why_not}. {GUIDE}."


def beside(name: str) -> dict:
    return BESIDE.get(name, {"temperature": 1.0})


def changed(name: str) -> SamplingParams:
    """Parameters with another value of this field than the default."""
    for value in VALUES:
        try:
            params = SamplingParams(**beside(name) | {name: value})
        except ValueError:
            continue
        if getattr(params, name) != getattr(DEFAULTS, name):
            return params
    raise AssertionError(f"{name} takes none of {VALUES}; add a value that it takes to VALUES in {__file__}")


def test_exceptions_are_fields():
    assert {name for table in EXCEPTIONS for name in table} <= {*FIELDS}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_checked(name):
    try:
        SamplingParams(**{name: object()})
    except ValueError:
        return
    pytest.fail(missing(name, "mmvllm/sampling_params.py", "the checks in SamplingParams.__post_init__"))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_documented(name):
    file = "mmvllm/sampling_params.py"
    assert f"\n        {name}: " in SamplingParams.__doc__, missing(name, file, "the Args section of SamplingParams")
    in_options, in_api = ((DOCUMENTS / file).read_text() for file in ("options.md", "http_api.md"))
    table = "the table of SamplingParams, with `python -m tests.helpers.option_tables`"
    assert f"| `{name}` | `{getattr(DEFAULTS, name)!r}` |" in in_options, missing(name, "docs/options.md", table)
    requests = in_api.partition("## Request fields\n")[2].partition("## Fields of other clients")[0]
    assert f"`{OTHER_NAMES.get(name, name)}`" in requests or name in NOT_OVER_HTTP, missing(
        name, "docs/http_api.md", 'the table in "Request fields"'
    )


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_reaches_the_kernel(name):
    """The packed rows of two sequences differ, of which one has another value."""
    rows = SamplingStates(2, 8, torch.device("cpu"))
    for row, params in enumerate([SamplingParams(temperature=1.0), changed(name)]):
        rows.add_sequence(row, Sequence([1], params, request_id="", block_size=4), frozenset())
    first, second = rows.on_device()
    what = "_row_params, and to ROW_PARAMS in kernels/common/row_params.py and the kernels"
    message = missing(name, "mmvllm/sampling/sampling_states.py", what, "NOT_DRAWN")
    assert not torch.equal(first, second) or name in NOT_DRAWN, message


@pytest.mark.parametrize("name", FIELDS)
def test_the_warm_up_takes_the_path_of_a_field(name):
    is_there = any(getattr(params, name) != getattr(DEFAULTS, name) for params in WARMUP_PARAMS)
    message = missing(name, "mmvllm/engine/llm_engine.py", "WARMUP_PARAMS", "NOT_WARMED_UP")
    assert is_there or name in NOT_WARMED_UP, message


def in_chat(name: str, value) -> SamplingParams:
    return chat_params(ChatRequest(**chat("Hi", **beside(name) | {OTHER_NAMES.get(name, name): value})), 100)


def in_completion(name: str, value) -> SamplingParams:
    body = CompletionRequest(**completion(**beside(name) | {OTHER_NAMES.get(name, name): value}))
    return completion_params(body, 100)


@pytest.mark.parametrize("request_", [in_chat, in_completion])
@pytest.mark.parametrize("name", FIELDS)
def test_the_server_takes_a_field(name, request_):
    if name in (NOT_IN_CHATS if request_ is in_chat else NOT_OVER_HTTP):
        return
    value = getattr(changed(name), name)
    given = list(value) if isinstance(value, tuple) else {"json_object": True} if name == "structured" else value
    exceptions = "NOT_IN_CHATS" if request_ is in_chat else "NOT_OVER_HTTP"
    try:
        params = request_(name, given)
    except ValidationError:
        params = None
    assert params is not None, missing(name, "mmvllm/server/common/protocol.py", "SamplingRequest", exceptions)
    passed = getattr(params, name) == value
    assert passed, missing(name, "mmvllm/server/common/sampling.py", "PARAMS_OF_BOTH_APIS", exceptions)


@pytest.mark.parametrize("name", FIELDS)
def test_captions_have_an_option_for_a_field(name):
    parser = argparse.ArgumentParser()
    caption.add_arguments(parser)
    is_there = name in {action.dest for action in parser._actions}
    what = "PROMPT_FIELDS (and to CaptionSettings in mmvllm/captioning/settings.py)"
    message = missing(name, "mmvllm/cli/caption.py", what, "NOT_ON_THE_COMMAND_LINE")
    assert is_there or name in NOT_ON_THE_COMMAND_LINE, message


@pytest.mark.parametrize("name", FIELDS)
def test_the_page_has_a_control_for_a_field(name):
    is_there = name in {field.name for field in fields(Options)}
    what = "Options (and a control to mmvllm/demo/page.py)"
    message = missing(name, "mmvllm/demo/conversation.py", what, "NOT_ON_THE_PAGE")
    assert is_there or name in NOT_ON_THE_PAGE, message
