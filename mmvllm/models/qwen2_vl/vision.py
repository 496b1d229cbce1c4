"""The Qwen2-VL vision transformer (arXiv 2409.12191), from packed patches of many images to merged embeddings."""

from collections.abc import Sequence

from torch import Tensor, nn

from mmvllm.config import VisionConfig
from mmvllm.inputs import Grid
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.norm import LayerNorm
from mmvllm.models.rotary import vision_cos_sin, vision_positions
from mmvllm.models.vision import PatchEmbed, PatchLayout, PatchMerger, VisionBlock, VisionMLP, frames


class Qwen2VLVisionTransformer(nn.Module):
    """Encodes all images of a step in one call."""

    def __init__(self, config: VisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(config, backend, LayerNorm, VisionMLP(config)) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, LayerNorm)

    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """Return positions (2, P); the segments are frames."""
        return PatchLayout((vision_positions(grids, self.config.spatial_merge_size),), (frames(grids),))

    def forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Encode packed, normalized patches (P, patch_dim) as embeddings (M, C)."""
        (positions,), (segments,) = layout.tensors, layout.segments
        cos, sin = vision_cos_sin(positions, self.config.head_dim)
        adapters = layout.adapters(patches)
        x, residual = self.patch_embed(patches, adapters), None  # (P, embed_dim)
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin, segments, adapters)
        return self.merger(x, residual, layout.adapters(x, self.config.spatial_merge_size**2))
