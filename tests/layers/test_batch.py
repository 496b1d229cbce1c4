"""`Batch` alone: the largest prompt batch, and parts that do not fit together."""

from dataclasses import replace

import pytest
import torch

from mmvllm.layers.batch import prompt_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens, num_logits, num_blocks", [(1, 1, 1), (16, 4, 1), (17, 17, 2), (4096, 64, 256)])
def test_the_largest_prompt_batch(num_tokens, num_logits, num_blocks):
    batch = prompt_batch(num_tokens, num_logits, block_size=16, device=CPU)
    assert batch.input_ids.tolist() == [0] * num_tokens
    assert batch.query_lens == batch.context_lens == (num_tokens,)
    assert torch.equal(batch.positions, torch.arange(num_tokens).expand(3, -1))
    assert batch.slot_mapping.tolist() == list(range(num_tokens))
    assert batch.block_table.tolist() == [list(range(num_blocks))]
    assert batch.logits_indices.tolist() == list(range(num_logits))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"positions": torch.zeros(3, 5)}, r"positions \(3, 5\), want \(3, 4\)"),
        ({"positions": torch.zeros(1, 4)}, r"positions \(1, 4\), want \(3, 4\)"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping \(3,\), want \(4,\)"),
        ({"query_lens": (3, 2)}, "query_lens sum to 5, want 4"),
        ({"kv_lens": torch.zeros(2)}, r"cu_seqlens_q \(2,\), want \(3,\)"),
    ],
)
def test_parts_of_different_sizes_are_refused(changes, message):
    with pytest.raises(AssertionError, match=message):
        replace(prompt_batch(4, 1, block_size=16, device=CPU), **changes)
