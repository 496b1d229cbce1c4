"""Reference results of transformers, and errors relative to float64."""

from math import prod
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmvllm import SamplingParams


class Reference:
    """The tokenizer, image processor and model of transformers, in float32, one request at a time."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.image_token_id = self.model.config.image_token_id

    def inputs(self, request: dict) -> dict:
        """What transformers' Qwen2VLProcessor returns, which cannot be constructed without torchvision."""
        images = [part["image"] for m in request["messages"] for part in m["content"] if "image" in part]
        text = self.tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
        made = dict(self.image_processor(images, return_tensors="pt")) if images else {}
        for grid in made.get("image_grid_thw", []):
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (prod(grid.tolist()) // 4), 1)
        made["input_ids"] = self.tokenizer(
            text.replace("<|placeholder|>", "<|image_pad|>"), return_tensors="pt", add_special_tokens=False
        )["input_ids"]
        made["mm_token_type_ids"] = (made["input_ids"] == self.image_token_id).int()
        return made

    @torch.inference_mode()
    def generate(self, request: dict, max_tokens: int = 32) -> list[int]:
        """Greedy tokens; end-of-sequence tokens are ignored."""
        inputs = self.inputs(request)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            pad_token_id=0,
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()


def first_logits(engine, inputs) -> torch.Tensor:
    """Logits (1, V) after a prompt, as the sampler gets them."""
    seen = []
    sampler = engine.executor.sampler
    engine.executor.sampler = lambda logits, *rest: seen.append(logits.clone()) or sampler(logits, *rest)
    multimodal = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
    engine.add_request(inputs["input_ids"][0].tolist(), SamplingParams(max_tokens=1), **multimodal)
    while not engine.is_finished():
        engine.step()
    engine.executor.sampler = sampler
    return seen[-1]


def assert_no_worse(got, plain, exact, slack: float = 2.0) -> None:
    """The error against float64 is at most `slack` times that of plain torch in the same dtype."""
    error, allowed = ((x.double() - exact).abs().max().item() for x in (got, plain))
    assert error <= slack * allowed, f"error {error:.2e}, plain torch {allowed:.2e}"


def in_double(inputs: dict) -> dict:
    return {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}


def in_float64(module, call):
    module.double()
    try:
        return call(module)
    finally:
        module.float()
