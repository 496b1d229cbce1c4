"""Random LoRA adapters, made and merged by PEFT."""

import shutil
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

# Of all families: the decoder's layers alone, and the ViT's with its mergers.
DECODER = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
VISION = r".*visual\.(blocks\.\d+\..*(qkv|proj|fc1|fc2|gate_proj|up_proj|down_proj)|.*merger.*(fc1|fc2|mlp\.[02]))"


def base_model(checkpoint: Path) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()


def make_adapter(folder: Path, checkpoint: Path, seed: int = 0, spread: float = 0.15, **config) -> Path:
    """Save a random adapter of a checkpoint."""
    torch.manual_seed(1000 + seed)
    model = get_peft_model(base_model(checkpoint), LoraConfig(**{"r": 4, "lora_alpha": 8} | config))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, spread)
    model.save_pretrained(folder)
    return folder


def merged_checkpoint(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Save the checkpoint with the adapter merged into its weights by PEFT."""
    merged = PeftModel.from_pretrained(base_model(checkpoint), adapter).merge_and_unload()
    shutil.copytree(checkpoint, folder)
    merged.save_pretrained(folder)
    return folder


def rename_tensors(adapter: Path, rename) -> Path:
    """Change the names of the tensors in a saved adapter."""
    path = adapter / "adapter_model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    return adapter
