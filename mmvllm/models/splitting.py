"""How a model's heads are divided among ranks, and the numbers of ranks that divide them."""

from dataclasses import replace

from mmvllm.config import ModelConfig
from mmvllm.errors import ArgumentError
from mmvllm.layers.sharding import Shard
from mmvllm.processes.ranks import Ranks
from mmvllm.utils.text import counted, listed


class PlannedRank(Ranks):
    """A rank without its peers and without collectives, for building its part of a model."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config with the numbers of heads of each of `size` ranks; other fields describe the whole model.

    If there are fewer key-value heads than ranks, several ranks have the same head. Raises ValueError with the possible
    sizes for any other size.
    """
    H, K = config.num_attention_heads, config.num_key_value_heads
    if size not in (sizes := possible_sizes(config)):
        heads = f"{H} attention and {counted(K, 'key-value head')}"
        devices = f"{listed(sizes)} devices" if len(sizes) > 1 else "1 device"
        template = "{tensor_parallel_size} is {size}; this model's {heads} can be split over {devices}"
        raise ArgumentError(template, size=size, heads=heads, devices=devices)
    return replace(config, num_attention_heads=H // size, num_key_value_heads=max(1, K // size))


def possible_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that divide the query heads and are divisors or multiples of the key-value heads."""
    H, K = config.num_attention_heads, config.num_key_value_heads
    return [size for size in range(1, H + 1) if H % size == 0 and (K % size == 0 or size % K == 0)]


def query_heads(config: ModelConfig, ranks: Ranks) -> Shard:
    """Return the query heads of this rank."""
    return Shard.cut(config.num_attention_heads, ranks)


def key_value_heads(config: ModelConfig, ranks: Ranks) -> Shard:
    """Return the key-value heads that this rank's query heads read."""
    K = config.num_key_value_heads
    return Shard(ranks.rank * K // ranks.size, max(1, K // ranks.size), K)
