"""Token masks compared with their reference and with the definition."""

import numpy as np
import pytest
import torch

from mmvllm.kernels.token_mask import mask_tokens, mask_tokens_torch, mask_tokens_triton

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V, block", [(1, 16), (31, 16), (64, 16), (1000, 256)])
def test_equal_to_the_definition(V, block, dtype, device):
    rng = np.random.default_rng(V)
    wide = torch.zeros(4, V + 3, dtype=dtype, device=device)
    wide[:, :V] = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    allowed = rng.integers(0, 2**32, (3, -(-V // 32)), np.uint32)
    allowed[0], allowed[1] = 0, 0xFFFFFFFF
    row_indices = [2, 3, 0]
    want = wide.clone()
    for bits, row_index in zip(allowed, row_indices, strict=True):
        for token in range(V):
            if not bits[token // 32] >> (token % 32) & 1:
                want[row_index, token] = -INF
    arguments = [torch.from_numpy(x).to(device) for x in (allowed.view(np.int32), np.array(row_indices, np.int32))]
    for mask in (mask_tokens, mask_tokens_torch, lambda *a: mask_tokens_triton(*a, block=block)):
        got = wide.clone()
        mask(got[:, :V], *arguments)
        assert torch.equal(got, want)
