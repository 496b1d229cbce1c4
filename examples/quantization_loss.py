"""The costs and savings of quantization: error of the logits, agreement of tokens, right answers, memory, speed.

    python examples/quantization_loss.py --scenes 100

Asks the same questions about held-out scenes in float32, in bfloat16, and with each quantization of the weights and of
the KV cache, on a CPU, where fp8 uses the slow reference. `--checkpoint FOLDER` compares further checkpoints, such as
quantized ones of the same model. Logits are taken at an answer's first token.
"""

import argparse
import time
from typing import NamedTuple

import torch
from evaluate_demo_model import held_out
from torch import Tensor

from mmvllm import LLM, SamplingParams
from mmvllm.cli.common import at_least_one
from mmvllm.layers.linear import weight_bytes

METHODS = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "KV cache in int8": {"kv_cache_dtype": "int8"},
    "KV cache in fp8": {"kv_cache_dtype": "fp8"},
}


class Run(NamedTuple):
    """First-token logits (R, V), token ids and text of whole answers, and the memory and speed of the run."""

    logits: Tensor
    tokens: list[list[int]]
    texts: list[str]
    weight_bytes: int
    tokens_per_second: float


def run(model: str | None, requests: list[dict], **engine_args) -> Run:
    llm = LLM(model, device="cpu", **engine_args)
    runner, logits = llm.engine.model_runner, []
    step = runner.run
    runner.run = lambda *args: logits.append(step(*args)) or logits[-1]
    for request in requests:  # one at a time, which keeps the rows in order
        llm.generate_multimodal([request], SamplingParams(max_tokens=1), use_tqdm=False)
    runner.run = step
    start = time.perf_counter()
    outputs = llm.generate_multimodal(requests, SamplingParams(max_tokens=128))
    seconds = time.perf_counter() - start
    tokens, texts = [output.token_ids for output in outputs], [output.text for output in outputs]
    size = weight_bytes(runner.model, runner.dtype)
    llm.exit()
    return Run(torch.cat(logits).double(), tokens, texts, size, sum(map(len, tokens)) / seconds)


def agreement(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of tokens before the first difference."""
    same = total = 0
    for one, other in zip(tokens, others, strict=True):
        equal = [a == b for a, b in zip(one, other, strict=False)] + [False]
        same += equal.index(False)
        total += len(one)
    return same / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: the bundled one)")
    parser.add_argument("--scenes", type=at_least_one, default=100)
    parser.add_argument("--checkpoint", action="append", default=[], help="folder of another checkpoint to compare")
    args = parser.parse_args()

    asked, requests = held_out(args.scenes)
    expected = [answer for *_, answer in asked]
    exact = run(args.model, requests, dtype="float32")
    spread = (exact.logits - exact.logits.mean(dim=1, keepdim=True)).square().mean().sqrt()
    print(f"{len(requests)} questions; logits spread {spread:.3g} around their mean")
    titles = "".join(f"{title:>9}" for title in ("largest", "tokens", "answers", "right"))
    print(f"{'':<18}{'logit error':>12}{titles}{'weights':>11}{'tokens/s':>10}")
    print_row("float32", exact, exact, spread, expected)
    for name, engine_args in METHODS.items():
        print_row(name, run(args.model, requests, dtype="bfloat16", **engine_args), exact, spread, expected)
    for folder in args.checkpoint:
        print_row(folder, run(folder, requests, dtype="bfloat16"), exact, spread, expected)


def print_row(name: str, run: Run, exact: Run, spread: Tensor, expected: list[str]) -> None:
    error = run.logits - exact.logits
    same = sum(text == other for text, other in zip(run.texts, exact.texts, strict=True)) / len(run.texts)
    right = sum(text == answer for text, answer in zip(run.texts, expected, strict=True)) / len(run.texts)
    print(
        f"{name:<18}{error.square().mean().sqrt() / spread:>12.2%}{error.abs().max():>9.3f}"
        f"{agreement(exact.tokens, run.tokens):>9.2%}{same:>9.2%}{right:>9.2%}"
        f"{run.weight_bytes / 2**20:>7.1f} MiB{run.tokens_per_second:>10.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
