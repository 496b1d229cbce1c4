"""Exact-match accuracy of the bundled model on held-out scenes.

    python examples/evaluate_demo_model.py --scenes 500

Draws scenes with seeds that training did not use, asks one question of each kind about each scene (describe, count,
what is at a place, which color, which digit) with `mmvllm.LLM`, and compares the whole answer with the expected one.
"""

import argparse
import random
import time
from collections import Counter

from scenes import draw, questions, random_scene

from mmvllm import LLM, SamplingParams

HELD_OUT_SEED = 1_000_000  # training seeds start at 10,000,000; the tokenizer was trained on scenes -1, -2, ...

Asked = tuple[int, str, str, str]  # scene, kind of question, question, expected answer


def held_out(num_scenes: int) -> tuple[list[Asked], list[dict]]:
    """Return all questions about scenes that training did not use, and their requests."""
    asked, requests = [], []
    for i in range(num_scenes):
        rng = random.Random(HELD_OUT_SEED + i)
        scene = random_scene(rng)
        image = draw(scene, rng)
        for kind, question, answer in questions(scene, rng):
            asked.append((i, kind, question, answer))
            content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            requests.append({"messages": [{"role": "user", "content": content}]})
    return asked, requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: the bundled one)")
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--show", type=int, default=5, help="print this many wrong answers")
    args = parser.parse_args()

    asked, requests = held_out(args.scenes)
    llm = LLM(args.model)
    start = time.perf_counter()
    outputs = llm.generate_multimodal(requests, SamplingParams(max_tokens=128))
    seconds = time.perf_counter() - start

    right, total, wrong_scenes = Counter(), Counter(), set()
    for (scene, kind, question, answer), output in zip(asked, outputs, strict=True):
        total[kind] += 1
        right[kind] += output.text == answer
        if output.text != answer:
            wrong_scenes.add(scene)
            if total.total() - right.total() <= args.show:
                print(f"scene {scene}: {question}\n  expected: {answer}\n  got:      {output.text}")
    for kind in total:
        print(f"{kind:<9} {right[kind]:5} of {total[kind]:5}  {right[kind] / total[kind]:7.2%}")
    print(f"{'all':<9} {right.total():5} of {total.total():5}  {right.total() / total.total():7.2%} exact")
    print(f"{args.scenes - len(wrong_scenes)} of {args.scenes} scenes without a wrong answer")
    print(f"{len(requests)} requests in {seconds:.1f} s")


if __name__ == "__main__":
    main()
