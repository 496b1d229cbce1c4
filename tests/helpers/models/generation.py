"""Checkpoints with a generation_config.json of their own."""

import json
from pathlib import Path

from mmvllm.models.folder import BUNDLED

# The values of published checkpoints.
QWEN2_VL = {"do_sample": True, "repetition_penalty": 1.0, "temperature": 0.01, "top_p": 0.001, "top_k": 1}
QWEN2_5_VL = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.000001}
QWEN3_VL = {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.0, "temperature": 0.7}


def bundled_with(folder: Path, generation: dict | str) -> Path:
    """Make a checkpoint in `folder`: the bundled one, with another generation_config.json."""
    folder.mkdir(exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).symlink_to(path)
    text = generation if isinstance(generation, str) else json.dumps(generation)
    (folder / "generation_config.json").write_text(text)
    return folder
