"""Runs the same requests in transformers, in left-padded batches of fixed size, with its image processor."""

import io
import time
from math import prod
from pathlib import Path

import torch
import transformers
from PIL import Image
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

# Without torchvision, older versions of transformers do not export it.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmvllm.bench.runs import Run, now, peak_memory, reset_peak_memory
from mmvllm.outputs import CompletionOutput, RequestOutput


class Transformers:
    def __init__(
        self, folder: Path, tokenizer, device: torch.device, dtype: torch.dtype, load_format: str, batch_size: int
    ):
        """Load the checkpoint in `folder`; `load_format` is "dummy" for random weights."""
        config = AutoConfig.from_pretrained(folder)
        model_class = getattr(transformers, config.architectures[0])
        if load_format == "dummy":
            self.model = dummy_model(model_class, config, device, dtype)
        else:
            self.model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self.images = image_processor(folder) if hasattr(config, "vision_config") else None
        self.tokenizer, self.device, self.batch_size = tokenizer, device, batch_size
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # Greedy, without an end-of-sequence token and without the checkpoint's other generation settings.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=tokenizer.pad_token_id)

    def run(self, requests: list[dict], output_tokens: int) -> Run:
        """Run the requests like `Mmvllm.run`; a request arrives when its batch starts."""
        reset_peak_memory(self.device)
        start_counter, start, outputs = now(self.device), time.time(), []
        for first in range(0, len(requests), self.batch_size):
            outputs += self._answer(requests[first : first + self.batch_size], output_tokens)
        return Run(start, start_counter, now(self.device) - start_counter, outputs, peak_memory(self.device))

    @torch.inference_mode()
    def _answer(self, requests: list[dict], output_tokens: int) -> list[RequestOutput]:
        arrival, first_token = time.time(), _FirstToken(self.device)
        inputs = self.inputs(requests).to(self.device)
        criteria = transformers.StoppingCriteriaList([first_token])
        generated = self.model.generate(**inputs, max_new_tokens=output_tokens, stopping_criteria=criteria)
        now(self.device)
        times = {"arrival_time": arrival, "first_token_time": first_token.time, "finish_time": time.time()}
        prompts, is_prompt = inputs["input_ids"], inputs["attention_mask"]
        columns = [
            generated[:, prompts.shape[1] :].tolist(),
            is_prompt.sum(dim=1).tolist(),
            inputs.get("mm_token_type_ids", torch.zeros_like(prompts)).sum(dim=1).tolist(),
        ]
        return [
            RequestOutput("", [CompletionOutput("", tokens, "length")], length, num_image_tokens=num_image, **times)
            for tokens, length, num_image in zip(*columns, strict=True)
        ]

    def inputs(self, requests: list[dict]) -> transformers.BatchFeature:
        """Return the inputs of transformers' processor, which cannot be created without torchvision."""
        messages = [request["messages"] for request in requests]
        images = [decoded(part["image"]) for turns in messages for part in turns[0]["content"] if "image" in part]
        inputs = self.images(images, return_tensors="pt") if images else transformers.BatchFeature()
        grids = iter(inputs.get("image_grid_thw", []))
        texts = [self._text(turns, grids) for turns in messages]
        options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
        inputs |= self.tokenizer(texts, return_tensors="pt", **options)
        if images:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        return inputs

    def _text(self, messages: list[dict], grids) -> str:
        """Return the prompt, with the placeholder repeated once per token of the image's grid."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if "image" not in messages[0]["content"][0]:
            return text
        pad = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
        return text.replace(pad, pad * (prod(next(grids).tolist()) // self.images.merge_size**2))


def image_processor(folder: Path, **settings):
    """Return the checkpoint's image processor in transformers, with Pillow as its backend even with torchvision."""
    return AutoImageProcessor.from_pretrained(folder, backend="pil", **settings)


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def dummy_model(model_class: type, config, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Create a model with small random weights; transformers' initialization takes minutes."""
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = model.to_empty(device=device).eval()
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    _compute_buffers(model, device)
    return model


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers such as rotary frequencies, which are not loaded: each module computes its own when created."""
    for module in list(model.modules()):
        if names := [name for name, _ in module.named_buffers(recurse=False)]:
            fresh = type(module)(module.config).to(device)
            for name in names:
                setattr(module, name, getattr(fresh, name))


class _FirstToken(transformers.StoppingCriteria):
    """Records the time of the first token; never stops generation."""

    def __init__(self, device: torch.device):
        self.device, self.time = device, None

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self.time is None:
            now(self.device)
            self.time = time.time()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
