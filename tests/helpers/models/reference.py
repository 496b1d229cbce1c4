"""Reference results of transformers, and errors relative to float64."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from mmvllm import SamplingParams
from mmvllm.processors.tensors import NAMES
from tests.helpers.media.video_references import processed


class Reference:
    """The tokenizer, image processor and model of transformers, one request at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        config = AutoConfig.from_pretrained(folder)
        self.folder, self.family = folder, config.model_type
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if hasattr(config, "vision_config"):
            self.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        model_class = getattr(transformers, config.architectures[0])
        # torch's grouped product, which transformers chooses for experts otherwise, has no float64.
        options = {"dtype": dtype, "experts_implementation": "eager"}
        self.model = model_class.from_pretrained(folder, **options).eval()

    def inputs(self, request: dict) -> dict:
        """What transformers' processors return, which cannot be constructed without torchvision."""
        parts = [part for m in request["messages"] for part in m["content"]]
        images = [part["image"] for part in parts if "image" in part]
        if any("video" in part for part in parts):
            return self._inputs_with_videos(request, images, [part["video"] for part in parts if "video" in part])
        text = self.tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
        made = dict(self.image_processor(images, return_tensors="pt")) if images else {}
        for grid in made.get("image_grid_thw", []):
            num_tokens = prod(grid.tolist()) // self.image_processor.merge_size**2
            text = text.replace("<|image_pad|>", "<|placeholder|>" * num_tokens, 1)
        made["input_ids"] = self.tokenizer(
            text.replace("<|placeholder|>", "<|image_pad|>"), return_tensors="pt", add_special_tokens=False
        )["input_ids"]
        made["mm_token_type_ids"] = (made["input_ids"] == self.model.config.image_token_id).int()
        return made

    def _inputs_with_videos(self, request: dict, images: list, videos: list) -> dict:
        fps = request.get("mm_processor_kwargs", {}).get("fps", 2.0)
        messages = [{**m, "content": [_named(part) for part in m["content"]]} for m in request["messages"]]
        given = [(np.stack([np.asarray(frame) for frame in video]), fps) for video in videos]
        made = processed(self.folder, self.family, messages, images, given)
        return {name: torch.from_numpy(value) for name, value in made.items() if name != "attention_mask"}

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

    @torch.inference_mode()
    def beams(self, request: dict, width: int, max_tokens: int, **options) -> list[tuple[list[int], float]]:
        """Tokens and scores of the hypotheses of a beam search, best first."""
        inputs = self.inputs(request)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        texts = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
        texts = [token_ids[:length] for token_ids, length in zip(texts, lengths, strict=True)]
        return list(zip(texts, out.sequences_scores.tolist(), strict=True))

    @torch.inference_mode()
    def logits(self, inputs: dict) -> torch.Tensor:
        """Logits (1, V) after the prompt."""
        return self.model(**inputs, use_cache=False).logits[:, -1]

    @torch.inference_mode()
    def logprobs(self, inputs: dict) -> torch.Tensor:
        """Log-probabilities (T - 1, V) of what follows each token but the last."""
        self.model.model.rope_deltas = None
        return self.model(**inputs, use_cache=False).logits[0, :-1].log_softmax(dim=-1)

    @torch.inference_mode()
    def hidden_states(self, inputs: dict) -> torch.Tensor:
        """The decoder's last hidden states (T, C), after its norm."""
        self.model.model.rope_deltas = None
        return self.model.model(**inputs, use_cache=False).last_hidden_state[0]

    def positions(self, inputs: dict) -> tuple[torch.Tensor, int]:
        """M-RoPE positions (3, T) of a prompt, and the delta of the tokens after it."""
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: inputs[name] for name in names if name in inputs}
        found, delta = self.model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **given)
        return found[:, 0], delta.item()

    @torch.inference_mode()
    def mm_embeds(self, inputs: dict) -> torch.Tensor:
        """Embeddings (M, mm_embed_size) of images or videos: the merger's, then each DeepStack layer's."""
        patches, grids = NAMES["image" if "pixel_values" in inputs else "video"]
        out = self.model.model.visual(inputs[patches], grid_thw=inputs[grids])
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], dim=1)

    def in_float64(self, call, inputs: dict) -> torch.Tensor:
        """`call(inputs)`, one of the methods above, of a float32 model, computed in float64."""
        inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        self.model.double()
        try:
            with Float64():
                return call(inputs)
        finally:
            self.model.float()


def _named(part: dict) -> dict:
    """A part as the chat template needs it."""
    return {key: value for key, value in part.items() if key in ("type", "text")}


class Float64(TorchFunctionMode):
    """What a model asks to be computed in float32, norms and rotary angles say, is computed in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = ([_widened(x) for x in args], {key: _widened(x) for key, x in (kwargs or {}).items()})
        return function(*args, **kwargs)


def _widened(x):
    return torch.float64 if x is torch.float32 else x


class EightBits(TorchFunctionMode):
    """Rounds inputs and weights of linear layers except routers to 8 bits, as mmvllm's int8 does, in plain torch."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._routers = {id(module.weight) for name, module in model.named_modules() if name.endswith(".mlp.gate")}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and id(args[1]) not in self._routers:
            args = _rounded(args[0]), _rounded(args[1]), *args[2:]
        elif function is torch.conv3d:
            args = args[0], _rounded(args[1].flatten(1)).view_as(args[1]), *args[2:]
        return function(*args, **(kwargs or {}))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Symmetric 8-bit rounding with a scale per row."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


class FourBits(TorchFunctionMode):
    """Rounds weights of the decoder's linear layers to 4 bits in groups, and others as `EightBits` does."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        layers = model.model.language_model.layers
        self._weights = {id(module.weight) for module in layers.modules() if isinstance(module, torch.nn.Linear)}
        self._others = EightBits(model)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and id(args[1]) in self._weights and args[1].shape[1] % 32 == 0:
            return function(args[0], _rounded_in_groups(args[1]), *args[2:])
        return self._others.__torch_function__(function, types, args, kwargs)


def _rounded_in_groups(weight: torch.Tensor) -> torch.Tensor:
    """To 16 values from the least, or 0, to the largest of each group of up to 128 columns."""
    size = next(size for size in (128, 64, 32) if weight.shape[1] % size == 0)
    groups = weight.float().unflatten(1, (-1, size))
    least, largest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (largest - least).clamp(min=1e-12) / 15
    zero = (-least / scale).round()
    codes = (groups / scale + zero).round().clamp(0, 15)
    return ((codes - zero) * scale).flatten(1).to(weight.dtype)


class EightBitFloats(TorchFunctionMode):
    """Rounds inputs and weights of the decoder's linear layers to e4m3, as mmvllm's fp8 does, in plain torch."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        layers = model.model.language_model.layers
        self._weights = {id(module.weight) for module in layers.modules() if isinstance(module, torch.nn.Linear)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and id(args[1]) in self._weights:
            args = _rounded_to_e4m3(args[0]), _rounded_to_e4m3(args[1]), *args[2:]
        return function(*args, **(kwargs or {}))


def _rounded_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """With a scale per row, whose largest value becomes 448; computed as mmvllm does, so that ties fall alike."""
    largest = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    rounded = (x.float() * (448 / largest)).to(torch.float8_e4m3fn)
    return (rounded.float() * (largest / 448)).to(x.dtype)


class ExpertsOf(TorchFunctionMode):
    """Records which experts routers choose, or, given such a record, has them choose these.

    A router whose third and fourth expert are nearly equal decides by the last bit, after which the number format is
    not what makes the difference.
    """

    def __init__(self, chosen: Sequence[torch.Tensor] | None = None):
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        self._given = None if chosen is None else iter(chosen)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        self.chosen.append(found.indices)
        if self._given is None:
            return found
        indices = next(self._given).to(args[0].device)
        return type(found)((args[0].gather(-1, indices), indices))


def first_logits(engine, inputs) -> torch.Tensor:
    """Logits (1, V) after a prompt, as the sampler gets them."""
    seen, runner = [], engine.model_runner
    run = runner.run
    runner.run = lambda *args: seen.append(run(*args).clone()) or seen[-1]
    names = (*NAMES["image"], *NAMES["video"], "second_per_grid_ts")
    multimodal = {key: inputs[key] for key in names if key in inputs}
    engine.add_request(inputs["input_ids"][0].tolist(), SamplingParams(max_tokens=1), **multimodal)
    while not engine.is_finished():
        engine.step()
    runner.run = run
    return seen[-1]


def assert_no_worse(got, plain, exact, slack: float = 2.0) -> None:
    """The error against float64 is at most `slack` times that of plain torch in the same dtype."""
    error, allowed = ((x.double() - exact).abs().max().item() for x in (got, plain))
    assert error <= slack * allowed, f"error {error:.2e}, plain torch {allowed:.2e}"
