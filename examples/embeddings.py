"""Find the nearest image by embeddings, and answer a multiple-choice question by log-probabilities.

python examples/embeddings.py
"""

from pathlib import Path

import numpy as np

from mmvllm import LLM

IMAGES = sorted((Path(__file__).parent / "images").glob("scene-*.png"))[:4]


def ask(question: str, *images: Path) -> dict:
    parts = [{"type": "image", "image": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]}


def main() -> None:
    with LLM() as llm:  # the bundled demo model, which was not trained for embeddings
        outputs = llm.embed([ask("Describe this image.", image) for image in IMAGES], use_tqdm=False)
        vectors = np.stack([output.embedding for output in outputs])
        query = llm.embed(ask("Describe this image.", IMAGES[1]), use_tqdm=False)[0].embedding
        print(f"the nearest to {IMAGES[1].name}: {IMAGES[int((vectors @ query).argmax())].name}")

        choices = ["There is one star.", "There are two stars.", "There are three stars."]
        [output] = llm.score(ask("How many stars are there?", IMAGES[0]), choices, use_tqdm=False)
        for choice, score in zip(choices, output.scores, strict=True):
            print(f"{score.logprob:9.3f}  {score.logprob / len(score.token_ids):7.3f} per token  {choice}")
        print(f"the most likely: {choices[output.best]}")


if __name__ == "__main__":
    main()
