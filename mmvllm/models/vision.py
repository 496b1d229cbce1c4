"""The Qwen2-VL vision transformer: packed patches of many pictures -> one row per merged token."""

import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.config import VisionConfig
from mmvllm.layers.attention import packed_attention
from mmvllm.models.rotary import apply_rotary, vision_cos_sin


def quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": F.gelu, "silu": F.silu}


class PatchEmbed(nn.Module):
    """The checkpoint's 3-D convolution, whose stride is its kernel, as the matrix product that it is."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.embed_dim, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segment_lens: list[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)  # each (P, H, D)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.proj(packed_attention(q, k, v, segment_lens).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(f"the ViT's hidden_act is {config.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")
        self.fc1 = nn.Linear(config.embed_dim, config.mlp_ratio * config.embed_dim)
        self.fc2 = nn.Linear(config.mlp_ratio * config.embed_dim, config.embed_dim)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segment_lens: list[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segment_lens)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Joins each merge_size x merge_size square of patches into one row of the decoder's width."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, config.hidden_size))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.width))  # (P, embed_dim) -> (M, C)


class VisionTransformer(nn.Module):
    """All pictures of a step in one call; patches attend within their own frame only."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """Normalised patches (P, patch_dim) of pictures with the given (t, h, w) grids, packed -> rows (M, C)."""
        merge_size, head_dim = self.config.spatial_merge_size, self.config.head_dim
        cos, sin = vision_cos_sin(grids, merge_size, head_dim, patches.device)
        segment_lens = [h * w for t, h, w in grids for _ in range(t)]
        x = self.patch_embed(patches)  # (P, embed_dim)
        for block in self.blocks:
            x = block(x, cos, sin, segment_lens)
        return self.merger(x)
