"""Parameters and floating-point operations of a model.

Shapes use the letters of `mmvllm/layers/batch.py`. A multiply and its add are two operations. Only matrix products and
attention are counted, because all other operations are negligible. Padding, which a checkpoint lacks, is not counted.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from mmvllm.config import ModelConfig
from mmvllm.inputs import Grid
from mmvllm.layers.attention import Segments
from mmvllm.models.registry import family_of
from mmvllm.models.weights import checkpoint_views

PARTS = {"visual.": "vision", "decoder.embed_tokens.": "embedding", "decoder.": "decoder", "lm_head.": "head"}


class ModelCosts:
    """Costs counted on the model itself, which is built on the meta device; they need no formulas per family."""

    def __init__(self, config: ModelConfig):
        self.config, self._counter = config, _Counter()
        with torch.device("meta"):
            self._model = family_of(config.architecture).build(config, self._counter)
        self._weights = self._count_linear_weights()
        self.num_parameters = self._count_parameters()
        views = checkpoint_views(self._model)
        self.num_expert_parameters = sum(one.view.numel() for one in views if ".experts." in one.parameter)
        self.vision_flops = lru_cache(maxsize=256)(self._vision_flops)

    @property
    def num_head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def active_share(self) -> float:
        """Share of the experts' parameters that one token uses; 1 for a model without experts."""
        experts = self.config.experts
        return experts.num_experts_per_tok / experts.num_experts if experts else 1.0

    def weights_read_by_a_step(self, num_tokens: int = 1) -> float:
        """Return the weights of decoder and head, for any number of tokens; an untied embedding reads only a few rows.

        Of the experts, a step reads the expected number that `num_tokens` tokens choose, if all experts are chosen
        equally often and independently.
        """
        unused = self.num_expert_parameters * (1 - self.active_share) ** num_tokens if self.config.experts else 0
        return self.num_parameters["decoder"] + self.num_head_weights - unused

    def decoder_flops(self, num_tokens: int, num_keys: float) -> float:
        """Return the operations of all layers; `num_keys` is the number of keys a token attends to, summed over tokens.

        A token is multiplied with every weight, but only of the experts that it chooses. Attention takes 4 H D
        operations per layer, token and key.
        """
        c = self.config
        attention = c.num_hidden_layers * 4 * c.num_attention_heads * c.head_dim * num_keys
        linear = sum(size for name, size in self._weights.items() if name.startswith("decoder."))
        return 2 * (linear + round(self.num_expert_parameters * self.active_share)) * num_tokens + attention

    def head_flops(self, num_rows: int) -> int:
        """Return the operations of `num_rows` rows of logits, one for each sampled token."""
        return 2 * self.num_head_weights * num_rows

    @torch.inference_mode()
    def _vision_flops(self, grid: Grid) -> int:
        """Return the operations of the ViT for an image, counted per linear layer and attention call, without data."""
        t, h, w = grid
        self._counter.flops = 0
        hooks = [
            module.register_forward_pre_hook(self._counter.linear(self._weights[name]))
            for name, module in self._model.named_modules()
            if name in self._weights
        ]
        self._model.encode(torch.empty(t * h * w, self.config.vision.patch_dim, device="meta"), [grid])
        for hook in hooks:
            hook.remove()
        return self._counter.flops

    def _count_parameters(self) -> dict[str, int]:
        """Return numbers by part; a tied head counts as "embedding" only, "decoder" is the layers and the last norm."""
        counts = dict.fromkeys(("vision", "decoder", "embedding", "head"), 0)
        for name, _, view, _ in checkpoint_views(self._model):
            counts[next(part for prefix, part in PARTS.items() if name.startswith(prefix))] += view.numel()
        return counts

    def _count_linear_weights(self) -> dict[str, int]:
        """Return the number of weights of each linear layer, by name."""
        weights = {name: 0 for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        for name, _, view, _ in checkpoint_views(self._model):
            layer, _, parameter = name.rpartition(".")
            if layer in weights and parameter == "weight":
                weights[layer] += view.numel()
        return weights


class _Counter:
    """An attention backend that counts operations and computes nothing."""

    name, block_size, in_graphs = "counter", 16, False

    def __init__(self):
        self.flops = 0

    def packed(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """Count, per segment of n rows, n**2 products of queries and keys and of weights and values, 2 H D each."""
        _, H, D = q.shape
        self.flops += 4 * H * D * sum(n * n for n in segments.lens)
        return torch.empty_like(q)

    def linear(self, num_weights: int) -> Callable:
        """Return a hook that counts the product of each row of a layer's input with its weights."""

        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.flops += 2 * num_weights * len(args[0])

        return count


def keys_seen(first: int, last: int) -> int:
    """Return how many keys the tokens [first, last) of a sequence attend to: themselves and all before them."""
    return last * (last + 1) // 2 - first * (first + 1) // 2
