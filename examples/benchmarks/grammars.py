"""The CPU time of structured output: compiling a grammar, and filling the mask of one row of logits.

    python examples/benchmarks/grammars.py
    python examples/benchmarks/grammars.py --tokenizer Qwen2-VL-2B-Instruct/

Completions are generated at random under each grammar. Threads fill the masks of a step while the model computes; a
step waits for them only if they take longer than the model.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from mmvllm import SamplingParams
from mmvllm.captioning import PRESET_SCHEMAS
from mmvllm.engine.tokenizer import load_tokenizer
from mmvllm.models.folder import BUNDLED
from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.scheduler.sequence import Sequence

GRAMMARS = {
    "tags-json": {"json": PRESET_SCHEMAS["tags-json"]},
    "product-json": {"json": PRESET_SCHEMAS["product-json"]},
    "any object": {"json_object": True},
    "choice of 100": {"choice": [f"label {i}" for i in range(100)]},
    "date": {"regex": "[0-9]{4}-(0[1-9]|1[0-2])-[0-9]{2}"},
}


def measure(compiler: GrammarCompiler, fields: dict, vocab_size: int, num_tokens: int) -> tuple[float, list[float]]:
    """Return the seconds to compile, and to fill the mask of each token of random completions."""
    params = SamplingParams(structured=fields)
    start = time.perf_counter()
    compiler.check(params.structured)
    compiled, fills = time.perf_counter() - start, []
    rng = np.random.default_rng(0)
    while len(fills) < num_tokens:
        seq = Sequence([0], params, request_id="", block_size=16)
        constraint = compiler.constraint(params.structured)
        for _ in range(min(200, num_tokens - len(fills))):
            allowed = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
            start = time.perf_counter()
            constraint.restrict(seq, allowed)
            fills.append(time.perf_counter() - start)
            ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(ids))
            if token_id in compiler.eos_token_ids:
                break
            seq.append_token(token_id)
    return compiled, fills


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED, help="a checkpoint's folder (default: the bundled)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per grammar (default: %(default)s)")
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.tokenizer)
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
    start = time.perf_counter()
    compiler.check(SamplingParams(structured={"regex": "a"}).structured)
    print(f"{len(tokenizer):,} tokens; llguidance's tokenizer took {time.perf_counter() - start:.2f} s\n")
    print("| grammar | compiled in (ms) | mask, median (µs) | 99 % (µs) |\n|---|---|---|---|")
    for name, fields in GRAMMARS.items():
        compiled, fills = measure(compiler, fields, len(tokenizer), args.tokens)
        median, high = np.percentile(fills, [50, 99]) * 1e6
        print(f"| {name} | {compiled * 1e3:.1f} | {median:.0f} | {high:.0f} |")


if __name__ == "__main__":
    main()
