"""The device's measured peaks of bandwidth and arithmetic, and the share of them that a run reached.

Decode reads weights and KV cache for a few tokens, so it is bound by memory bandwidth. The ViT and prefill multiply
large matrices, so they are bound by arithmetic. `StoredBytes` are the weights that a decode step reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmvllm.bench.costs import ModelCosts, keys_seen
from mmvllm.bench.runs import Run, is_prefill, now
from mmvllm.entrypoints.llm import LLM
from mmvllm.layers.linear import Linear, LinearMethodModule
from mmvllm.models.quant_methods import choose_linear_methods
from mmvllm.outputs import RequestOutput
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.worker.memory import kv_block_bytes

READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 30}  # far larger than any cache
MATRIX_SIZES = {"cpu": 2048, "cuda": 8192}
ATTEMPTS = 5
CALLS = {"cpu": 1, "cuda": 20}  # per attempt: on a GPU, a single call is too short to be timed from the host


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes of weights that a decode step reads: decoder layers, of which `experts` belong to experts, and head.

    The embedding is left out, because a step reads a few rows of it; a head that is tied to it counts.
    """

    decoder: int
    experts: int
    head: int

    @classmethod
    def of(cls, model: nn.Module) -> "StoredBytes":
        sizes = {name: _num_bytes(module) for name, module in model.named_modules()}

        def total(prefix: str, part: str = "") -> int:
            return sum(size for name, size in sizes.items() if name.startswith(prefix) and part in name)

        return cls(total("decoder.") - total("decoder.embed_tokens"), total("decoder.", ".experts"), total("lm_head"))


def _num_bytes(module: nn.Module) -> int:
    """Return the bytes of the tensors that a module itself holds; a tensor in oneDNN's layout has no `nbytes`."""
    tensors = {id(tensor): tensor for tensor in _own_tensors(module)}  # a packed weight includes the module's bias
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers, and tensors of the weights that linear methods have processed."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    if isinstance(module, LinearMethodModule):
        yield from _tensors_in(module.linear_method)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, LinearMethod | list | tuple):
        for part in vars(value).values() if isinstance(value, LinearMethod) else value:
            yield from _tensors_in(part)


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured peaks, each the best of several attempts.

    With 8-bit floats, the ViT and the head, which stay in the model's dtype, do not reach the peak of arithmetic.
    """

    bytes_per_second: float  # measured by a sum over float32
    flops_per_second: float  # measured by a product of square matrices, in the model's dtype or quantized

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> "Machine":
        return cls(bytes_per_second(device), flops_per_second(device, dtype, quantization))


def bytes_per_second(device: torch.device) -> float:
    values = torch.ones(READ_BYTES[device.type] // 4, device=device)
    return values.nbytes / _best_seconds(values.sum, device)


@torch.inference_mode()
def flops_per_second(device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> float:
    """Measure the peak with `Linear`, the layer that the models use."""
    size = MATRIX_SIZES[device.type]
    x, linear = torch.randn(size, size, device=device).to(dtype), Linear(size, size, bias=False).to(device, dtype)
    # The fastest products of such a model: on a GPU, int4 weights are multiplied in the model's dtype.
    if quantization == "int4":
        quantization = "int8" if device.type == "cpu" else None
    decoder = nn.ModuleDict({"layers": nn.ModuleList([linear])})  # its layers support all kinds of quantization
    choose_linear_methods(nn.ModuleDict({"decoder": decoder}), device, dtype, quantization)
    linear.requires_grad_(False).process_weights_after_loading()
    return 2 * size**3 / _best_seconds(lambda: linear(x), device)


def _best_seconds(work, device: torch.device) -> float:
    times = []
    for _ in range(1 + ATTEMPTS):  # the first is a warm-up
        start = now(device)
        for _ in range(CALLS[device.type]):
            work()
        times.append((now(device) - start) / CALLS[device.type])
    return min(times[1:])


class Roofline:
    """The limits of one model on one machine, for requests with at most one image each."""

    def __init__(self, machine: Machine, llm: LLM):
        runner = llm.engine.model_runner
        self.machine, self.costs = machine, ModelCosts(runner.model_config)
        self.stored = StoredBytes.of(runner.model)
        self.key_bytes = kv_block_bytes(runner.model_config, 1, runner.kv_dtype)  # of a key and its value in all layers

    def shares(self, run: Run) -> dict[str, float | None]:
        """Return the share of bandwidth in decode, and of arithmetic in prefill and in the ViT; None without such work.

        Each share refers to the time spent in that part of the steps.
        """
        decode_steps = [step for step in run.steps if not is_prefill(step)]
        prefill_steps = [step for step in run.steps if is_prefill(step)]
        encoding_steps = [step for step in run.steps if step.num_images]
        return {
            "decode_of_bandwidth": _share(
                self._read_bytes(run, decode_steps), _seconds(decode_steps, "decoder"), self.machine.bytes_per_second
            ),
            "prefill_of_arithmetic": _share(
                self._prefill_flops(run, prefill_steps),
                _seconds(prefill_steps, "decoder"),
                self.machine.flops_per_second,
            ),
            "vision_of_arithmetic": _share(
                self._vision_flops(run), _seconds(encoding_steps, "vision"), self.machine.flops_per_second
            ),
        }

    def weight_bytes(self, num_tokens: int) -> float:
        """Return the weight bytes that a decode step of `num_tokens` reads; tokens choose experts independently."""
        unused = (1 - self.costs.active_share) ** num_tokens
        return self.stored.decoder + self.stored.head - unused * self.stored.experts

    def limit(self, run: Run, concurrency: int) -> float:
        """Return requests per second at the machine's peaks, with decode steps of `concurrency` requests each.

        The ViT and prefill are bound by arithmetic, decode steps by bandwidth or arithmetic, whichever takes longer.
        """
        outputs, peak = run.outputs, self.machine.flops_per_second
        num_decoded, width = sum(len(output.token_ids) - 1 for output in outputs), min(concurrency, len(outputs))
        read = num_decoded / width * self.weight_bytes(width) + _decode_keys(outputs) * self.key_bytes
        decode_flops = self._flops(num_decoded, _decode_keys(outputs), num_decoded)
        num_computed = sum(output.num_prompt_tokens - output.num_cached_tokens for output in outputs)
        prompt_flops = self._vision_flops(run) + self._flops(num_computed, _prompt_keys(outputs), len(outputs))
        return len(outputs) / (prompt_flops / peak + max(read / self.machine.bytes_per_second, decode_flops / peak))

    def _flops(self, num_tokens: int, num_keys: float, num_rows: int) -> float:
        return self.costs.decoder_flops(num_tokens, num_keys) + self.costs.head_flops(num_rows)

    def _read_bytes(self, run: Run, decode_steps: list) -> float:
        num_tokens = sum(step.num_decode_tokens for step in decode_steps)
        weights = sum(self.weight_bytes(step.num_decode_tokens) for step in decode_steps)
        return weights + num_tokens * _mean_decode_keys(run.outputs) * self.key_bytes

    def _prefill_flops(self, run: Run, prefill_steps: list) -> float:
        """Return the operations of steps that compute all prompts and decode some tokens along with them."""
        num_decoded = sum(step.num_decode_tokens for step in prefill_steps)
        num_tokens = num_decoded + sum(step.num_prefill_tokens for step in prefill_steps)
        num_keys = _prompt_keys(run.outputs) + num_decoded * _mean_decode_keys(run.outputs)
        return self._flops(num_tokens, num_keys, num_decoded + len(run.outputs))

    def _vision_flops(self, run: Run) -> int:
        return sum(self.costs.vision_flops(grid) for grid in run.grids)


def _prompt_keys(outputs: list[RequestOutput]) -> int:
    return sum(keys_seen(output.num_cached_tokens, output.num_prompt_tokens) for output in outputs)


def _decode_keys(outputs: list[RequestOutput]) -> int:
    """Count the keys that decoded tokens attend to; a completion's first token is sampled in prefill."""
    return sum(
        keys_seen(output.num_prompt_tokens, output.num_prompt_tokens + len(output.token_ids) - 1) for output in outputs
    )


def _mean_decode_keys(outputs: list[RequestOutput]) -> float:
    return _decode_keys(outputs) / max(1, sum(len(output.token_ids) - 1 for output in outputs))


def _seconds(steps: list, part: str) -> float:
    return sum(step.seconds.get(part, 0.0) for step in steps)


def _share(work: float, seconds: float, peak: float) -> float | None:
    return work / seconds / peak if work and seconds else None
