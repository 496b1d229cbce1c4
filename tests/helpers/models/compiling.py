"""Kernels compiled for GPUs not at hand: `python -m tests.helpers.models.compiling 90 bfloat16` prints JSON lines.

`python -m tests.helpers.models.compiling variants` prints how many variants of each kernel the steps of one model need.

Launches are replaced by compilations, with the arguments of `cases` on the device "meta": their addresses begin at 0,
aligned as in a real allocation, so that the compiler is told what it is told on a GPU. Triton's interpreter must
be off, so tests run this in a separate process.
"""

import importlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mmvllm.kernels.common.dispatch import ExpertShapes, KernelShapes, VisionShapes
from mmvllm.kernels.packed_attention import packed_attention_triton
from mmvllm.kernels.paged_attention import paged_attention_triton
from mmvllm.kernels.quick_gelu import quick_gelu_triton
from mmvllm.kernels.rotary import rotary_triton, rotary_write_kv_triton
from mmvllm.kernels.splice import splice_triton
from mmvllm.kernels.write_kv import write_kv_triton

META = torch.device("meta")
MODELS = {
    "Qwen2-VL-2B": KernelShapes(12, 2, 128, 1536, 8960, 151936, VisionShapes(16, 80, 5120), None),
    "Qwen2-VL-7B": KernelShapes(28, 4, 128, 3584, 18944, 152064, VisionShapes(16, 80, 5120), None),
    "Qwen3-VL-30B-A3B": KernelShapes(
        32, 4, 128, 2048, 6144, 151936, VisionShapes(16, 72, 4304), ExpertShapes(128, 8, 768)
    ),
}
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program can have


@dataclass(frozen=True, slots=True)
class NoGPU:
    """The part of Triton's driver that compilation asks."""

    arch: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def replace_launches(arch: int, launch: Callable[[JITFunction, tuple, dict], None]) -> None:
    """Call launch(kernel, args, options) for every kernel[grid](*args, **options) of this process from now on."""
    triton.runtime.driver.set_active(NoGPU(arch))
    JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **options: launch(kernel, args, options)


def kernel_modules() -> Iterator:
    for file in sorted((Path(__file__).parents[3] / "kernels").glob("*.py")):
        module = importlib.import_module(f"mmvllm.kernels.{file.stem}")
        if hasattr(module, "cases"):
            yield module


# Compute capability 8.0 has no such floats; there, "fp8" is refused for weights and for the KV cache.
WRITE_E4M3 = {"_quantize_rows_kernel", "_silu_mul_fp8_kernel", "_add_rms_norm_fp8_kernel"}


def compile_all(arch: int, dtype: torch.dtype) -> Iterator[dict]:
    """Every variant of every kernel that the models need: its resources, from ptxas, and how the loads are done."""
    triton.knobs.nvidia.dump_ptxas_log = True
    found = []

    def launch(kernel: JITFunction, args: tuple, options: dict) -> None:
        reads_e4m3 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
        if arch >= 89 or not (reads_e4m3 or kernel.__name__ in WRITE_E4M3):
            found.extend(compiled(kernel, args, options))

    replace_launches(arch, launch)
    for model, shapes in MODELS.items():
        for module in kernel_modules():
            for case in module.cases(shapes, META, dtype):
                getattr(module, f"{case.kernel}_triton")(*case.args)
                for variant in found:
                    yield variant | {"model": model, "label": case.label}
                found.clear()


def compiled(kernel: JITFunction, args: tuple, options: dict) -> Iterator[dict]:
    """The kernel's resources if this variant is new."""
    log = io.StringIO()
    with redirect_stdout(log):
        binary = kernel.run(*args, grid=(1,), warmup=True, **options)
    if text := log.getvalue():
        yield {
            "kernel": kernel.__name__,
            "shared": binary.metadata.shared,
            "warps": binary.metadata.num_warps,
            "registers": int(re.search(r"Used (\d+) registers", text)[1]),
            "spilled": sum(int(size) for size in re.findall(r"(\d+) bytes spill", text)),
            "narrow": narrow_accesses(binary.asm["ptx"]),
            "fusion_stated": "enable_fp_fusion" in options,
        }


def narrow_accesses(ptx: str) -> int:
    """Accesses to global memory of one 16-bit value each, which the compiler makes where it cannot prove alignment."""
    return len(re.findall(r"(?:ld|st)\.global(?![^ ]*\.v\d)[^ ]*\.[bfus]16 ", ptx))


def variants() -> dict[str, int]:
    """The number of variants of each kernel that many steps of one model would compile; nothing is compiled."""
    keys: dict[str, set] = {}

    def launch(kernel: JITFunction, args: tuple, options: dict) -> None:
        keys.setdefault(kernel.__name__, set()).add(key(kernel, args, options))

    replace_launches(90, launch)
    for num_seqs, max_blocks, num_decodes, offset in product((1, 2, 16, 17, 64), (1, 2, 16, 33), (0, 1, 5), range(4)):
        step(num_seqs, max_blocks, min(num_decodes, num_seqs), offset)
    return {name: len(found) for name, found in keys.items()}


def key(kernel: JITFunction, args: tuple, options: dict) -> str:
    """What the compiled variant depends on."""
    binder = kernel.device_caches[0][4]
    _, specialization, others = binder(*args, debug=False, **options)
    return f"{specialization} {others}"


def step(num_seqs: int, max_blocks: int, num_decodes: int, offset: int) -> None:
    """The launches of a layer and of the ViT, with integer arrays that are views from any value on."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(math.prod(shape) + offset, dtype=dtype, device=META)[offset:].view(shape)

    H, K, D, C = 12, 2, 128, 1536
    N = num_decodes + 7 * (num_seqs - num_decodes)
    q, k, v = torch.empty(N, H + 2 * K, D, dtype=torch.bfloat16, device=META).split([H, K, K], dim=1)
    cos, sin = torch.empty(2, N, D // 2, dtype=torch.bfloat16, device=META)
    cache = torch.empty(2, 100, 16, K, D, dtype=torch.bfloat16, device=META)
    slots = ints(N, dtype=torch.int64)
    write_kv_triton(k, v, *cache, slots)
    q = rotary_write_kv_triton(q, k, v, cos, sin, *cache, slots)
    lens = (ints(num_seqs + 1), ints(num_seqs), ints(num_seqs, max_blocks))
    paged_attention_triton(q, *cache, *lens, 7 if num_decodes < num_seqs else 1, num_decodes)
    x = torch.empty(N, C, dtype=torch.bfloat16, device=META)
    splice_triton(x, x[: num_seqs + 1], ints(num_seqs + 1, dtype=torch.int64))
    q, k, v = torch.empty(4 * N, 3, 16, 80, dtype=torch.bfloat16, device=META).unbind(1)
    q, k = rotary_triton(q, k, *torch.empty(2, 4 * N, 40, device=META))
    packed_attention_triton(q, k, v, ints(num_seqs + 1), 4 * max_blocks)
    quick_gelu_triton(x)


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        print(json.dumps(variants()))
    else:
        for variant in compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2])):
            print(json.dumps(variant), flush=True)
