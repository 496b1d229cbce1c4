"""The largest logit and the log-sum-exp, compared with their references and with float64."""

import pytest
import torch

from mmvllm.kernels.argmax import (
    argmax,
    argmax_logsumexp,
    argmax_logsumexp_torch,
    argmax_logsumexp_triton,
    argmax_torch,
    argmax_triton,
)

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V, block", [(1, 16), (7, 16), (1000, 256), (4096, 1024)])
def test_equal_to_the_reference(V, block, dtype, device):
    wide = torch.full((6, V + 3), INF, dtype=dtype, device=device)
    logits = wide[:, :V]  # strided rows, followed by values that are not logits
    logits.copy_(3 * torch.randn(6, V, generator=torch.Generator().manual_seed(V)))
    logits[1] = logits[1].round()  # ties: the first is taken
    logits[2] = 0.0
    logits[3, : V // 2] = -INF
    logits[4] *= 1000
    want = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    exact = logits.double().logsumexp(-1).cpu()
    assert torch.equal(argmax(logits).cpu(), want)
    assert torch.equal(argmax_torch(logits).cpu(), want)
    assert torch.equal(argmax_triton(logits, block=block).cpu(), want)
    for compute in (argmax_logsumexp_torch, argmax_logsumexp, lambda x: argmax_logsumexp_triton(x, block=block)):
        token_ids, logsumexp = (x.cpu() for x in compute(logits))
        assert torch.equal(token_ids, want)
        assert logsumexp.dtype == torch.float64
        assert (logsumexp - exact).abs().max() < 1e-6  # the sum is rounded to float32


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_token_do_not_affect_others(dtype, device):
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits[0], logits[1], logits[2, 50], logits[3, 50], logits[4, 1:] = -INF, torch.nan, torch.nan, INF, -INF
    want = [-1, -1, -1, -1, 0, logits[5].argmax().item()]
    assert argmax(logits).tolist() == want
    assert argmax_triton(logits, block=64).tolist() == want
    for token_ids, logsumexp in (argmax_logsumexp_torch(logits), argmax_logsumexp_triton(logits, block=64)):
        assert token_ids.tolist() == want
        torch.testing.assert_close(logsumexp[4:].cpu(), logits[4:].double().logsumexp(-1).cpu(), rtol=0, atol=1e-6)


def test_no_rows(device):
    assert argmax(torch.empty(0, 10, device=device)).tolist() == []
