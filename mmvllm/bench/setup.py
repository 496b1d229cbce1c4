"""The setup shared by throughput and latency: the engines, the machine and the workload."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from mmvllm.bench.openvino import OpenVino
from mmvllm.bench.report import device_name
from mmvllm.bench.roofline import Machine, Roofline
from mmvllm.bench.runs import Mmvllm, Run
from mmvllm.bench.workload import Workload, image_sizes
from mmvllm.config import EngineConfig, ModelConfig, given_engine_args
from mmvllm.entrypoints.llm import LLM
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_config
from mmvllm.utils.text import counted


@dataclass(frozen=True, slots=True)
class Bench:
    """The engines by name (mmvllm, and the engine of --compare), their roofline and their workload."""

    engines: dict
    roofline: Roofline
    workload: Workload
    device: torch.device
    config: ModelConfig
    dtype: torch.dtype
    attention: str
    max_num_seqs: int

    @classmethod
    def open(cls, args: argparse.Namespace, max_num_seqs: int, stack: ExitStack) -> "Bench":
        """Measure the machine while its memory is free, then load the engines; the stack closes them."""
        sizes, options = image_sizes(args.size), {"max_num_seqs": max_num_seqs} | _engine_options(args)
        engine_config = EngineConfig(**options)
        folder = resolve_folder(args.model, with_weights=engine_config.load_format != "dummy")
        config, device = load_config(folder), engine_config.resolve_device()
        if args.compare == "openvino" and device.type != "cpu":
            raise ValueError("--compare openvino runs on the CPU; give --device cpu")
        dtype = engine_config.resolve_dtype(config.dtype, device, config.quantization is not None)
        machine = _measured_machine(device, dtype, engine_config.quantization)
        llm = LLM(folder, **options)
        stack.callback(llm.exit)
        engines = {"mmvllm": Mmvllm(llm)}
        if args.compare == "transformers":
            from mmvllm.bench.reference import Transformers

            engines["transformers"] = Transformers(
                folder, llm.tokenizer, device, dtype, engine_config.load_format, max_num_seqs
            )
        if args.compare == "openvino":
            engines["openvino"] = OpenVino(
                args.openvino_model, args.openvino_python, config, llm.tokenizer, max_num_seqs, stack
            )
        workload = Workload(
            llm.tokenizer,
            sizes=sizes,
            prompt_tokens=args.prompt_tokens,
            text_share=getattr(args, "text_share", 0.0) if config.vision else 1.0,
            seed=args.seed,
        )
        attention = llm.engine.attention.name
        return cls(engines, Roofline(machine, llm), workload, device, config, dtype, attention, max_num_seqs)

    def described(self) -> dict:
        """Return entries of the JSON line: dtype and attention backend, the machine's peaks, OpenVINO's version."""
        found = {"dtype": self.dtype, "attention": self.attention, "machine": asdict(self.roofline.machine)}
        return found | {name: engine.version for name, engine in self.engines.items() if name == "openvino"}

    def rounds(self, number: int, num_requests: int, output_tokens: int) -> list[dict[str, Run]]:
        """Return each round's runs by engine, all on the same requests; a first warm-up round is dropped."""
        return [self._round(i, num_requests, output_tokens) for i in range(number + 1)][1:]

    def _round(self, i: int, num_requests: int, output_tokens: int) -> dict[str, Run]:
        requests = self.workload.requests(num_requests if i else min(num_requests, self.max_num_seqs))
        runs = {}
        for name, engine in self.engines.items():
            runs[name] = engine.run(requests, output_tokens)
            label = f"round {i}" if i else "warm-up"
            print(f"{label}: {counted(len(requests), 'request')}, {name}, {runs[name].seconds:.2f} s", file=sys.stderr)
        return runs


def _measured_machine(device: torch.device, dtype: torch.dtype, quantization: str | None) -> Machine:
    machine = Machine.measure(device, dtype, quantization)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine sizes its KV cache by the free memory
    kind = quantization or str(dtype).removeprefix("torch.")
    print(
        f"{device_name(device)}: reads {machine.bytes_per_second / 1e9:.1f} GB/s, "
        f"multiplies at {machine.flops_per_second / 1e12:.3g} Tflop/s in {kind}"
    )
    return machine


def _engine_options(args: argparse.Namespace) -> dict:
    """Return the fields of `EngineConfig` that the user passed, with a default for comparisons."""
    # On a GPU, leave half of the memory to transformers.
    default = {"gpu_memory_utilization": 0.5} if args.compare else {}
    return default | given_engine_args(vars(args))
