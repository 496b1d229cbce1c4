"""The Qwen2-VL vision transformer: packed patches of many images -> one row per merged token."""

import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.kernels.quick_gelu import quick_gelu
from mmvllm.kernels.rotary import rotary
from mmvllm.layers.attention import AttentionBackend, Segments
from mmvllm.layers.linear import Linear, by_rows
from mmvllm.models.qwen2_vl.config import Qwen2VLVisionConfig
from mmvllm.models.rotary import vision_cos_sin

ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": F.gelu, "silu": F.silu}


class PatchEmbed(nn.Module):
    """The checkpoint's 3-D convolution, whose stride is its kernel, as the matrix product that it is."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        self.proj = Linear(config.patch_dim, config.embed_dim, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class VisionAttention(nn.Module):
    def __init__(self, config: Qwen2VLVisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.num_heads = config.num_heads
        self.backend = backend
        self.qkv = Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, frames: Segments) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)  # each (P, H, D)
        q, k = rotary(q, k, cos, sin)
        return self.proj(self.backend.packed(q, k, v, frames).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(f"the ViT's hidden_act is {config.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")
        self.fc1 = Linear(config.embed_dim, config.mlp_ratio * config.embed_dim)
        self.fc2 = Linear(config.mlp_ratio * config.embed_dim, config.embed_dim)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return by_rows(lambda rows: self.fc2(self.act(self.fc1(rows))), x)


class VisionBlock(nn.Module):
    def __init__(self, config: Qwen2VLVisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attn = VisionAttention(config, backend)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, frames: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, frames)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Joins each merge_size x merge_size square of patches into one row of the decoder's width."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(Linear(width, width), nn.GELU(), Linear(width, config.hidden_size))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.width))  # (P, embed_dim) -> (M, C)


class VisionTransformer(nn.Module):
    """All images of a step in one call; patches attend within their own frame only."""

    def __init__(self, config: Qwen2VLVisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config, backend) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """Normalised patches (P, patch_dim) of images with the given (t, h, w) grids, packed -> rows (M, C)."""
        merge_size, head_dim = self.config.spatial_merge_size, self.config.head_dim
        cos, sin = vision_cos_sin(grids, merge_size, head_dim, patches.device)
        frames = Segments.of([h * w for t, h, w in grids for _ in range(t)], patches.device)
        x = self.patch_embed(patches)  # (P, embed_dim)
        for block in self.blocks:
            x = block(x, cos, sin, frames)
        return self.merger(x)
