"""How the heads of a model are divided among ranks, and over how many they can be."""

from dataclasses import replace

from mmvllm.config import ModelConfig
from mmvllm.errors import ArgumentError
from mmvllm.layers.sharding import Shard
from mmvllm.processes.ranks import Ranks
from mmvllm.utils.text import counted, listed


class PlannedRank(Ranks):
    """One of several ranks without the others, to build what it would have of a model: it exchanges nothing."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config with the numbers of heads that each of `size` ranks has; the rest is that of the whole model.

    Where there are fewer key-value heads than ranks, several ranks have the same one. Raises ValueError, which names
    the possible sizes, for another one.
    """
    H, K = config.num_attention_heads, config.num_key_value_heads
    if size not in (sizes := possible_sizes(config)):
        heads = f"{H} attention and {counted(K, 'key-value head')}"
        devices = f"{listed(sizes)} devices" if len(sizes) > 1 else "1 device"
        template = "{tensor_parallel_size} is {size}; this model's {heads} can be split over {devices}"
        raise ArgumentError(template, size=size, heads=heads, devices=devices)
    return replace(config, num_attention_heads=H // size, num_key_value_heads=max(1, K // size))


def possible_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks that divide the query heads, and divide the key-value heads or are divided by them."""
    H, K = config.num_attention_heads, config.num_key_value_heads
    return [size for size in range(1, H + 1) if H % size == 0 and (K % size == 0 or size % K == 0)]


def query_heads(config: ModelConfig, ranks: Ranks) -> Shard:
    """The query heads of this rank."""
    return Shard.cut(config.num_attention_heads, ranks)


def key_value_heads(config: ModelConfig, ranks: Ranks) -> Shard:
    """Those that the rank's query heads read."""
    K = config.num_key_value_heads
    return Shard(ranks.rank * K // ranks.size, max(1, K // ranks.size), K)
