"""Parameters and floating-point operations of a model.

Letters as in `mmvllm/batch.py`. A multiply and its add are two operations; only matrix products and attention are
counted, because all other operations are negligible.
"""

import torch
from torch import nn

from mmvllm.config import ModelConfig
from mmvllm.layers.attention import TorchAttention
from mmvllm.models.registry import family_of

PARTS = {"visual.": "vision", "decoder.embed_tokens.": "embedding", "decoder.": "decoder", "lm_head.": "head"}


class ModelCosts:
    """Counted on the model itself, which is built without allocating memory: no family's sizes are repeated here."""

    def __init__(self, config: ModelConfig):
        with torch.device("meta"):
            self._model = family_of(config.architecture).build(config, TorchAttention)
        self.config = config
        self.num_parameters = self._count_parameters()
        self._merger_weights = self._linear_weights("visual.merger.")
        self._patch_weights = self._linear_weights("visual.") - self._merger_weights
        self._decoder_weights = self._linear_weights("decoder.")

    def weights_read_by_a_step(self) -> int:
        """All weights of the decoder and the head, for any number of tokens; of an untied embedding only a few rows."""
        return self.num_parameters["decoder"] + self.config.vocab_size * self.config.hidden_size

    def vision_flops(self, num_patches: int) -> int:
        """Of an image with one frame: weights times patches, the merger's times merged rows, and attention.

        Attention in a layer is P**2 products of queries and keys and as many of weights and values, 2 H D operations
        each.
        """
        v = self.config.vision
        num_rows = num_patches // v.spatial_merge_size**2
        attention = v.depth * 4 * num_patches**2 * v.num_heads * v.head_dim
        return 2 * self._patch_weights * num_patches + 2 * self._merger_weights * num_rows + attention

    def decoder_flops(self, num_tokens: int, num_keys: float) -> float:
        """Of all layers; `num_keys` is the number of keys that a token attends to, summed over the tokens.

        A token is multiplied with every weight, and attention takes 4 H D operations per layer, token and key.
        """
        c = self.config
        attention = c.num_hidden_layers * 4 * c.num_attention_heads * c.head_dim * num_keys
        return 2 * self._decoder_weights * num_tokens + attention

    def head_flops(self, num_rows: int) -> int:
        """Of the logits, which are computed only for rows that sample a token."""
        return 2 * self.config.vocab_size * self.config.hidden_size * num_rows

    def _count_parameters(self) -> dict[str, int]:
        """By part; a tied head counts in "embedding" only, and "decoder" is the layers and the last norm."""
        counts = dict.fromkeys(("vision", "decoder", "embedding", "head"), 0)
        for name, parameter in self._model.named_parameters():
            counts[next(part for prefix, part in PARTS.items() if name.startswith(prefix))] += parameter.numel()
        return counts

    def _linear_weights(self, prefix: str) -> int:
        modules = (module for name, module in self._model.named_modules() if name.startswith(prefix))
        return sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))


def keys_seen(first: int, last: int) -> int:
    """Keys that the tokens [first, last) of a sequence attend to: with a causal mask, themselves and all before."""
    return last * (last + 1) // 2 - first * (first + 1) // 2
