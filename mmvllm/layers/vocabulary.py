"""The embedding and the head, whose vocabulary is split over ranks (arXiv 1909.08053)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.layers.linear import AssembledModule, Linear
from mmvllm.layers.sharding import CheckpointView, Shard, shard_width
from mmvllm.processes.ranks import SINGLE, Ranks


class VocabularyEmbedding(nn.Module, AssembledModule):
    """Embeddings (N, C) of token ids (N,); the weight (V', C) is the rank's part of V rows, padded to equal widths."""

    def __init__(self, vocab_size: int, hidden_size: int, ranks: Ranks = SINGLE):
        super().__init__()
        self.ranks, self.shard = ranks, Shard.cut(vocab_size, ranks)
        self.weight = nn.Parameter(torch.empty(shard_width(vocab_size, ranks), hidden_size))

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        yield _view(self.weight, self.shard)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self.shard.start
        is_other = (own < 0) | (own >= self.shard.length)
        rows = F.embedding(own.masked_fill_(is_other, 0), self.weight)
        return self.ranks.all_reduce(rows.masked_fill_(is_other[:, None], 0))


class VocabularyHead(Linear):
    """Logits (R, V) of hidden states (R, C) on rank 0, its part (R, V') on another rank; no collective if R is 0."""

    def __init__(self, hidden_size: int, vocab_size: int, ranks: Ranks = SINGLE):
        super().__init__(hidden_size, shard_width(vocab_size, ranks), bias=False)
        self.ranks, self.shard = ranks, Shard.cut(vocab_size, ranks)

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        if self.weight is not None:  # None in a head that is tied to the embedding
            yield _view(self.weight, self.shard)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.shard.whole)
        return self.ranks.gather(super().forward(x))[:, : self.shard.whole].contiguous()


def _view(weight: Tensor, shard: Shard) -> CheckpointView:
    return CheckpointView("weight", None, weight.data[: shard.length], (shard, Shard.of(weight.shape[1])))
