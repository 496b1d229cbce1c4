"""What quantization costs, as the example measures it: one row of logits for each request."""

import sys
from pathlib import Path

import pytest
import torch

from mmvllm.models.folder import BUNDLED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from evaluate_demo_model import held_out
from quantization_loss import agreement, run


@pytest.mark.slow
def test_each_request_has_logits_an_answer_and_a_size():
    requests = held_out(1)[1][:2]
    exact = run(BUNDLED, requests, dtype="float32")
    coded = run(BUNDLED, requests, dtype="float32", kv_cache_dtype="int8")
    assert exact.logits.shape[0] == len(exact.tokens) == len(exact.texts) == 2
    assert exact.logits.argmax(dim=1).tolist() == [tokens[0] for tokens in exact.tokens]
    assert exact.logits.dtype == torch.float64 and not torch.equal(exact.logits, coded.logits)
    assert exact.weight_bytes == coded.weight_bytes > 0 and exact.tokens_per_second > 0
    assert agreement(exact.tokens, exact.tokens) == 1
