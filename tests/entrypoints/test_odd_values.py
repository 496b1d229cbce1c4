"""Whatever a Python program passes in place of a prompt or a request, the error is a sentence about it."""

import numpy as np
import pytest
import torch

from mmvllm.errors import RequestError

DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]
VALUES = {
    "nothing": None,
    "empty array": np.zeros(0),
    "array": np.zeros((2, 2)),
    "tensor": torch.zeros(3),
    "nested": DEEP,
    "digits": 10**5000,
    "object": object(),
    "bytes": b"a",
    "number": 3.5,
    "list of nothing": [None],
    "list of lists": [[]],
    "long list": [10**5000],
}
ONE = {"max_tokens": 1}
ENTRIES = {
    "generate": lambda llm, value: llm.generate(value, ONE),
    "prompt": lambda llm, value: llm.generate({"prompt": value}, ONE),
    "token ids": lambda llm, value: llm.generate({"prompt_token_ids": value}, ONE),
    "media": lambda llm, value: llm.generate({"prompt": "a", "multi_modal_data": [value]}, ONE),
    "image": lambda llm, value: llm.generate({"prompt": "a", "multi_modal_data": {"image": [value]}}, ONE),
    "generate_multimodal": lambda llm, value: llm.generate_multimodal(value, ONE),
    "messages": lambda llm, value: llm.generate_multimodal({"messages": value}, ONE),
    "message": lambda llm, value: llm.chat([{"role": "user", "content": value}], ONE),
    "role": lambda llm, value: llm.chat([{"role": value, "content": "a"}], ONE),
    "tools": lambda llm, value: llm.chat([{"role": "user", "content": "a"}], ONE, tools=[value]),
    "embed": lambda llm, value: llm.embed(value),
    "score": lambda llm, value: llm.score(["a"], [value]),
    "add_request": lambda llm, value: llm.add_request(value),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_odd_value_is_refused_in_a_sentence(entry, value, shared_llm):
    with pytest.raises(RequestError) as error:
        entry(shared_llm, value)
    assert 10 < len(str(error.value)) < 600


@pytest.mark.parametrize("value", [np.zeros(0), np.zeros((2, 2)), torch.zeros(3), [], 7, "image"], ids=repr)
def test_media_that_are_no_dict_are_refused(value, shared_llm):
    with pytest.raises(RequestError, match="multi_modal_data must be a dict"):
        shared_llm.generate({"prompt": "a", "multi_modal_data": value}, ONE)


@pytest.mark.parametrize("params", [None, ONE, {"beam_width": 2, "max_tokens": 1}, 7])
def test_beam_search_needs_its_own_parameters(params, shared_llm):
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got"):
        shared_llm.beam_search("a", params)
