"""Accuracy with 8-bit weights and activations: error of the logits, agreement of tokens, and correct answers.

    python examples/quantization_loss.py --scenes 100

Asks the same questions about held-out scenes in float32, in bfloat16, and in bfloat16 with `quantization="int8"` and
`quantization="fp8"`, on a CPU: the products of fp8 are those of its reference. Logits are those of an answer's first
token.
"""

import argparse

import torch
from evaluate_demo_model import held_out

from mmvllm import LLM, SamplingParams
from mmvllm.cli.common import at_least_one


def answers(model: str | None, requests: list[dict], **engine_args) -> tuple[torch.Tensor, list[list[int]], list[str]]:
    """First-token logits (R, V), and token ids and text of whole answers."""
    llm = LLM(model, device="cpu", **engine_args)
    logits = []
    hook = llm.engine.model_runner.model.register_forward_hook(lambda module, inputs, output: logits.append(output))
    for request in requests:  # one at a time, so that rows come in order
        llm.generate_multimodal([request], SamplingParams(max_tokens=1), use_tqdm=False)
    hook.remove()
    outputs = llm.generate_multimodal(requests, SamplingParams(max_tokens=128))
    llm.exit()
    return torch.cat(logits).double(), [o.token_ids for o in outputs], [o.text for o in outputs]


def agreement(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Share of tokens before the first difference."""
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
    args = parser.parse_args()

    asked, requests = held_out(args.scenes)
    expected = [answer for *_, answer in asked]
    exact, exact_tokens, exact_texts = answers(args.model, requests, dtype="float32")
    spread = (exact - exact.mean(dim=1, keepdim=True)).square().mean().sqrt()
    print(f"{len(requests)} questions; logits spread {spread:.3g} around their mean")
    print(f"{'':<16}{'logit error':>12}{'largest':>10}{'first token':>13}{'tokens':>9}{'answers':>9}{'right':>9}")
    rows = {"float32": (exact, exact_tokens, exact_texts)}
    rows["bfloat16"] = answers(args.model, requests, dtype="bfloat16")
    for quantization in ("int8", "fp8"):
        rows[f"bfloat16 {quantization}"] = answers(args.model, requests, dtype="bfloat16", quantization=quantization)
    for name, (logits, tokens, texts) in rows.items():
        error = logits - exact
        first = (logits.argmax(dim=1) == exact.argmax(dim=1)).double().mean()
        same = sum(text == other for text, other in zip(texts, exact_texts, strict=True)) / len(texts)
        right = sum(text == answer for text, answer in zip(texts, expected, strict=True)) / len(texts)
        print(
            f"{name:<16}{error.square().mean().sqrt() / spread:>12.2%}{error.abs().max():>10.3f}{first:>13.2%}"
            f"{agreement(exact_tokens, tokens):>9.2%}{same:>9.2%}{right:>9.2%}"
        )


if __name__ == "__main__":
    main()
