"""`mmvllm bench kernels`: each Triton kernel compared with its torch reference, on the model's shapes."""

import argparse
import pkgutil
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from types import ModuleType

import torch

import mmvllm.kernels
from mmvllm.bench.report import number, percent, print_table, record
from mmvllm.bench.roofline import bytes_per_second
from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.kernels.common.dispatch import Case, ExpertShapes, KernelShapes, VisionShapes
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_config
from mmvllm.utils.transfer import current_device

CPU_SECONDS = 0.1  # minimum for the repetitions of one case


def run(args: argparse.Namespace) -> dict:
    """Print the table and return the record."""
    modules = _modules(args.names)
    engine_config = EngineConfig(device=args.device, dtype=args.dtype)
    config = load_config(resolve_folder(args.model, with_weights=False))
    device = engine_config.resolve_device()
    dtype = engine_config.resolve_dtype(config.dtype, device, config.quantization is not None)
    bandwidth = bytes_per_second(device) if device.type == "cuda" else None
    shapes = kernel_shapes(config)
    with current_device(device):
        results = [
            _measure(module, case, device, bandwidth)
            for module in modules
            for case in module.cases(shapes, device, dtype)
        ]
    _print(results)
    if device.type != "cuda":
        print("kernels need CUDA: only their torch references were timed")
    return record(args, device, config, dtype=dtype, bytes_per_second=bandwidth, results=results)


def kernel_shapes(config: ModelConfig) -> KernelShapes:
    v, e = config.vision, config.experts
    return KernelShapes(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        vision=VisionShapes(v.num_heads, v.head_dim, v.intermediate_size) if v else None,
        experts=ExpertShapes(e.num_experts, e.num_experts_per_tok, e.intermediate_size) if e else None,
    )


def _modules(names: list[str]) -> list[ModuleType]:
    """Return all kernel modules, or those with the given names."""
    known = [name for _, name, _ in pkgutil.iter_modules(mmvllm.kernels.__path__)]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no kernel {unknown[0]!r}; known: {', '.join(known)}")
    return [import_module(f"mmvllm.kernels.{name}") for name in known if name in names or not names]


def _measure(module: ModuleType, case: Case, device: torch.device, bandwidth: float | None) -> dict:
    """Return the times of a kernel and its reference; rates are the kernel's or, on a CPU, the reference's."""
    seconds = {"torch": _median_seconds(lambda: getattr(module, f"{case.kernel}_torch")(*case.args), device)}
    if device.type == "cuda":
        seconds["triton"] = _median_seconds(lambda: getattr(module, f"{case.kernel}_triton")(*case.args), device)
    best = seconds.get("triton", seconds["torch"])
    return {
        "kernel": case.kernel,
        "case": case.label,
        "triton_seconds": seconds.get("triton"),
        "torch_seconds": seconds["torch"],
        "ratio": seconds["torch"] / best if device.type == "cuda" else None,
        "bytes_per_second": case.bytes / best,
        "flops_per_second": case.flops / best if case.flops else None,
        "share_of_bandwidth": case.bytes / best / bandwidth if bandwidth else None,
    }


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench  # times each call with events and clears the L2 cache before it

        return do_bench(work, return_mode="median") / 1000
    work()
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < CPU_SECONDS:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def _print(results: list[dict]) -> None:
    header = ["triton us", "torch us", "ratio", "GB/s", "of bandwidth", "Gflop/s"]
    rows = [
        [
            f"{result['kernel']} {result['case']}",
            *(number(result[f"{kind}_seconds"], 1e6) for kind in ("triton", "torch")),
            number(result["ratio"]),
            number(result["bytes_per_second"], 1e-9),
            percent(result["share_of_bandwidth"]),
            number(result["flops_per_second"], 1e-9),
        ]
        for result in results
    ]
    print_table("median", header, rows)
