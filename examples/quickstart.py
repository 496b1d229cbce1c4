"""Pictures, several turns, several pictures and plain text in one batch, and a stream.

python examples/quickstart.py
"""

from pathlib import Path

from mmvllm import LLM, SamplingParams

IMAGES = Path(__file__).parent / "images"


def ask(question: str, *names: str) -> dict:
    parts = [{"type": "image", "image": IMAGES / name} for name in names]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]}


def main() -> None:
    llm = LLM()  # the bundled demo model; LLM("Qwen/Qwen2-VL-2B-Instruct") is a real one
    requests = [
        ask("Describe this image.", "scene-04.png"),
        ask("How many shapes are there?", "scene-04.png"),  # the picture's KV blocks are shared with the first
        ask("What is at the top right?", "scene-07.png"),
    ]
    for request, output in zip(requests, llm.generate_multimodal(requests), strict=True):
        print(
            f"{request['messages'][0]['content'][-1]['text']}  {output.text}  ({output.num_image_tokens} image tokens)"
        )

    pictures = (ask("Describe this image.", path.name) for path in sorted(IMAGES.glob("*.png")))
    for output in llm.stream_multimodal(pictures, SamplingParams(max_tokens=64)):
        print(f"{output.request_id}: {output.text}")


if __name__ == "__main__":
    main()
