"""Published checkpoints without their weights, from the folder that MMVLLM_CHECKPOINT_METADATA names.

It has, per checkpoint, a folder with the repository's small files. MMVLLM_VIDEO_REFERENCE names a folder with values
that transformers' video processing gives for them, and the script that made them.
"""

import json
import os
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

VARIABLE = "MMVLLM_CHECKPOINT_METADATA"
ROOT = Path(os.environ.get(VARIABLE) or "unset")
needs_metadata = pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no folder of metadata")
VIDEO_VARIABLE = "MMVLLM_VIDEO_REFERENCE"
VIDEO_ROOT = Path(os.environ.get(VIDEO_VARIABLE) or "unset")
needs_video_reference = pytest.mark.skipif(
    not (os.environ.get(VARIABLE) and os.environ.get(VIDEO_VARIABLE)),
    reason=f"{VARIABLE} and {VIDEO_VARIABLE} name no folders",
)

Shapes = dict[str, torch.Size]


def read_index(name: str) -> dict | None:
    """The index of weights; None where the repository has none."""
    paths = list((ROOT / name).glob("*.index*.json"))
    return json.loads(paths[0].read_text()) if paths else None


@cache
def published_shapes(name: str) -> Shapes:
    """Shapes of the tensors of transformers' model, by their published names and in their published layout."""
    config = AutoConfig.from_pretrained(ROOT / name)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    shapes = {}
    for key, tensor in model.state_dict().items():
        if "Qwen2" in config.architectures[0]:
            key = key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        shapes[key] = tensor.mT.shape if ".mlp.experts." in key else tensor.shape
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def write_sparse_zeros(path: Path, shapes: Shapes) -> None:
    """A bfloat16 safetensors file of these shapes, all zeros, as a sparse file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
