"""Tokenizers with chat templates: the bundled one, and published ones if their files are there."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from mmvllm.engine.tokenizer import load_tokenizer
from mmvllm.models.folder import BUNDLED

ROOT = os.environ.get("MMVLLM_CHECKPOINT_METADATA")
# The checkpoints whose folders have a vocabulary, and those that share it but come without its files.
PUBLISHED = {
    "Qwen2-VL-2B-Instruct": None,
    "Qwen2-VL-7B-Instruct": None,
    "Qwen2.5-VL-3B-Instruct": "Qwen2.5-VL-7B-Instruct",
    "Qwen2.5-VL-7B-Instruct": None,
    "Qwen3-4B": "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-2B-Instruct": "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-4B-Instruct": None,
    "Qwen3-VL-8B-Instruct": "Qwen3-VL-4B-Instruct",
    "Qwen3.5-0.8B": None,
    "Qwen3.5-4B": "Qwen3.5-0.8B",
    "Qwen3.5-9B": "Qwen3.5-0.8B",
}
TEXT_ONLY = "Qwen3-4B"  # its template takes strings, not parts
NAMES = ["bundled", *(PUBLISHED if ROOT else ())]


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name == "bundled":
        return load_tokenizer(BUNDLED)
    with TemporaryDirectory() as folder:
        link_checkpoint(name, Path(folder))
        return load_tokenizer(Path(folder))


def link_checkpoint(name: str, folder: Path) -> None:
    """Link the files of a published checkpoint, including its vocabulary, into a folder."""
    for source in filter(None, (PUBLISHED[name], name)):
        _link(Path(ROOT) / source, folder, is_own=source == name)


def _link(source: Path, folder: Path, is_own: bool) -> None:
    """Link files; of another checkpoint only the vocabulary."""
    for path in source.iterdir():
        name = "tokenizer.json" if path.name == "tokenizer.REBUILT.json" else path.name
        if is_own or name in ("tokenizer.json", "vocab.json", "merges.txt"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(path)
