"""RequestOutput gives access to its first completion."""

import pytest

from mmvllm.outputs import CompletionOutput, RequestOutput


def test_an_output_has_the_attributes_of_its_first_completion_and_reads_like_a_dict():
    completion = CompletionOutput("a cat", [5, 6], "eos", cumulative_logprob=-1.5, logprobs=[{5: -1.0}, {6: -0.5}])
    output = RequestOutput("r", [completion, CompletionOutput("a dog", [7], "length")])
    for name in ("text", "token_ids", "finish_reason", "cumulative_logprob", "logprobs"):
        assert getattr(output, name) == output[name] == getattr(completion, name)
    with pytest.raises(KeyError, match="caption"):
        output["caption"]


def test_an_output_without_completions_has_finish_reason_error():
    output = RequestOutput("r", error="no such file")
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "error")
    assert output.logprobs is None and output.cumulative_logprob is None


def test_an_output_converts_to_a_dict():
    output = RequestOutput("r", [CompletionOutput("text", [1], "eos")])
    assert dict(output)["text"] == "text" and [*output] == [*output.keys()] == [*dict(output)]
