"""A mixture of experts: each token goes through the MLPs that its router chooses (arXiv 1701.06538)."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.config import ExpertsConfig
from mmvllm.kernels.common.dispatch import runs_triton
from mmvllm.kernels.grouped_linear import grouped_linear
from mmvllm.kernels.silu_mul import silu_mul
from mmvllm.kernels.splice import splice_add
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.linear import LinearMethodModule, by_rows
from mmvllm.layers.sharding import CheckpointView, Shard
from mmvllm.processes.ranks import SINGLE, Ranks
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.onednn import OneDNNLinear


class SparseMLP(nn.Module):
    """A router and its experts.

    Each rank has the router and a part of the experts; the sum of the ranks' results is the result of all experts.
    """

    def __init__(self, hidden_size: int, experts: ExpertsConfig, ranks: Ranks = SINGLE):
        super().__init__()
        self.num_experts_per_tok = experts.num_experts_per_tok
        self.gate = nn.Linear(hidden_size, experts.num_experts, bias=False)  # not a Linear: it is never quantized
        self.experts = Experts(hidden_size, Shard.cut(experts.num_experts, ranks), experts.intermediate_size)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return the weighted sum (N, C) of the rank's experts for x (N, C); experts have no adapters."""
        probs = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probs.topk(self.num_experts_per_tok, dim=-1)  # (N, k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, chosen, weights.to(x.dtype))  # rounded as in transformers


class Experts(nn.Module, LinearMethodModule):
    """Gated MLPs (arXiv 2002.05202): `gate_up_proj` (E, 2 I, C), gate first, and `down_proj` (E, C, I).

    With a shard of the experts, E is its length, and the choices of other experts add nothing. A token's results are
    added in an order that depends only on this token: by expert on a CPU, by probability with Triton.
    """

    linear_method: list[tuple[LinearMethod, LinearMethod]] | None = None  # gate_up and down of each expert

    def __init__(self, hidden_size: int, experts: int | Shard, intermediate_size: int):
        super().__init__()
        self.shard = Shard.of(experts)
        num_experts = self.shard.length
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self._shapes = [self.gate_up_proj.shape[1:], self.down_proj.shape[1:]]

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        for name, parameter in self.named_parameters():
            region = self.shard, *map(Shard.of, parameter.shape[1:])
            yield CheckpointView(name, None, parameter.data, region)

    def weight_shapes(self) -> Sequence[torch.Size]:
        return self._shapes * self.shard.length

    def process_weights_after_loading(self) -> None:
        if self.linear_method_cls is not None:
            # Unlike in `Linear`, few rows are not padded: weights of 1536 x 2048 are read at 23 GB/s, padded at 18.
            make = (
                partial(OneDNNLinear, min_rows=1) if self.linear_method_cls is OneDNNLinear else self.linear_method_cls
            )
            experts = zip(self.gate_up_proj.data, self.down_proj.data, strict=True)
            self.linear_method = [(make(gate_up, bias=None), make(down, bias=None)) for gate_up, down in experts]
            self.gate_up_proj = self.down_proj = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum (N, C) of the experts chosen for each token of x (N, C), with their weights (N, k)."""
        if self.shard.length == 0:
            return torch.zeros_like(x)
        own_first = (chosen.flatten() - self.shard.start) % self.shard.whole
        sorted_experts, order = own_first.sort(stable=True)
        experts = torch.arange(self.shard.length, device=x.device)
        ends = torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)  # end of each expert's rows
        return (self._grouped if runs_triton(x) else self._in_a_loop)(x, weights, order, ends)

    def _grouped(self, x: Tensor, weights: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """Compute all experts at once, reading nothing on the host; `order` (N k,) sorts the choices by expert."""
        k = weights.shape[1]
        gate_up = grouped_linear(x[order // k], self.gate_up_proj, ends)
        rows = grouped_linear(silu_mul(gate_up), self.down_proj, ends)
        if self.shard.length < self.shard.whole:  # rows of other experts are not written: they may be NaN
            is_other = torch.arange(len(rows), device=x.device) >= ends[-1]
            rows = rows.masked_fill_(is_other[:, None], 0)
        results = torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, (-1, k))  # (N, k, C)
        return (results * weights[..., None].float()).sum(dim=1).to(x.dtype)

    def _in_a_loop(self, x: Tensor, weights: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """Compute one expert after the other, skipping experts that no token has chosen."""
        tokens, weights = order // weights.shape[1], weights.flatten()[order, None].float()
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            if start < end:
                at = tokens[start:end]
                splice_add(total, self._mlp(expert, x[at]) * weights[start:end], at)
        return total.to(x.dtype)

    def _mlp(self, expert: int, rows: Tensor) -> Tensor:
        if self.linear_method is None:
            gate_up_proj, down_proj = (partial(F.linear, weight=w[expert]) for w in (self.gate_up_proj, self.down_proj))
        else:
            gate_up_proj, down_proj = self.linear_method[expert]
        return by_rows(lambda some: down_proj(silu_mul(gate_up_proj(some))), rows)
