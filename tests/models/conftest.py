"""Modified copies of the random checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A function that copies a checkpoint, with its tensors and its config changed by the given functions."""

    def copy(shape: str, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
        source, folder = checkpoints(shape), tmp_path / "copy"
        shutil.copytree(source, folder)
        save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config(json.loads((source / "config.json").read_text()))))
        return folder

    return copy
