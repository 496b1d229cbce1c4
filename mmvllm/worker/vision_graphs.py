"""The ViT as CUDA graphs, by number of patches; patches that are left over attend to each other only."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from mmvllm.layers.attention import Segments
from mmvllm.models.interface import Model
from mmvllm.models.vision import PatchLayout
from mmvllm.utils.transfer import to_device
from mmvllm.worker.cuda_graphs import Graphs

NUM_PATCHES = (256, 512, 768, 1024, 1536, 2048)  # launching takes a small part of larger calls
PATCHES_PER_SEGMENT = 32  # a graph has room for as many segments as if all had this size


class VisionGraphs:
    """Captures at construction; `run` replays a call for which `size` finds a graph."""

    def __init__(self, graphs: Graphs, model: Model, dtype: torch.dtype, device: torch.device):
        vision, largest = model.config.vision, NUM_PATCHES[-1]
        self._model, self._patches_per_embed = model, vision.spatial_merge_size**2
        self._patches = torch.zeros(largest, vision.patch_dim, dtype=dtype, device=device)
        self._embeds = torch.empty(
            largest // self._patches_per_embed, model.config.mm_embed_size, dtype=dtype, device=device
        )
        self._layouts, self._replays = {}, {}
        for size in tqdm(NUM_PATCHES[::-1], "CUDA graphs of the ViT", disable=None, leave=False):
            layout = model.layout([(1, vision.spatial_merge_size, size // vision.spatial_merge_size)])
            lens = [_padded_lens([], size, segments.longest) for segments in layout.segments]
            if all(lens):  # not if the ViT's windows are too small
                segments = tuple(Segments.of(of_kind, device) for of_kind in lens)
                self._layouts[size] = PatchLayout(layout.tensors, segments).to(device)
                self._replays[size] = graphs.capture(partial(self._compute, size))
        self.sizes = sorted(self._replays)

    def size(self, layout: PatchLayout) -> int | None:
        """The smallest graph with room for the patches and segments of a layout."""
        P = sum(layout.segments[0].lens)
        fitting = (size for size in self.sizes[bisect_left(self.sizes, P) :] if all(self._lens(size, layout)))
        return next(fitting, None)

    def run(self, size: int, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Patches (P, patch_dim) -> embeddings (M, mm_embed_size), valid until the next run; layout on the host."""
        P, kept = len(patches), self._layouts[size]
        self._patches[:P] = patches
        for own, tensor in zip(kept.tensors, layout.tensors, strict=True):
            own.copy_(to_device(F.pad(tensor, (0, own.shape[-1] - tensor.shape[-1])), own.device))
        for own, lens in zip(kept.segments, self._lens(size, layout), strict=True):
            own.cu_seqlens.copy_(Segments.of(lens, own.cu_seqlens.device).cu_seqlens)
        self._replays[size]()
        return self._embeds[: P // self._patches_per_embed]

    def _lens(self, size: int, layout: PatchLayout) -> list[list[int]]:
        kept = self._layouts[size].segments
        pairs = zip(layout.segments, kept, strict=True)
        return [_padded_lens(segments.lens, size, own.longest) for segments, own in pairs]

    def _compute(self, size: int) -> None:
        embeds = self._model.encode_patches(self._patches[:size], self._layouts[size])
        self._embeds[: len(embeds)] = embeds


def _padded_lens(lens: Sequence[int], size: int, longest: int) -> list[int]:
    """Pad `lens` to the segment count of the graph for `size` patches.

    They then sum to `size`, and no added length exceeds `longest`; [] if there are too many.
    """
    whole, rest = divmod(size - sum(lens), longest)
    padded = [*lens, *[longest] * whole, rest]
    missing = size // PATCHES_PER_SEGMENT - len(padded)
    return padded + [0] * missing if missing >= 0 else []
