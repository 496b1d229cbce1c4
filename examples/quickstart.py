"""An image, a conversation about it and a text-only request in one batch; then a stream over a folder.

python examples/quickstart.py
"""

from pathlib import Path

from mmvllm import LLM, SamplingParams

IMAGES = Path(__file__).parent / "images"


def user(question: str, *names: str) -> dict:
    parts = [{"type": "image", "image": IMAGES / name} for name in names]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def main() -> None:
    llm = LLM()  # the bundled demo model; LLM("Qwen/Qwen2-VL-2B-Instruct") for real use
    first = user("Describe this image.", "scene-04.png")
    answer = {"role": "assistant", "content": llm.generate_multimodal([{"messages": [first]}])[0].text}
    requests = [
        {"messages": [first, answer, user("How many stars are there?")]},  # reuses the cached prefix
        {"messages": [user("What is at the top left?", "scene-07.png")]},
        {"messages": [user("Count the shapes.")]},  # no image: the model guesses
    ]
    print(answer["content"])
    for output in llm.generate_multimodal(requests):
        print(f"{output.text}  ({output.num_prompt_tokens} prompt tokens, {output.num_cached_tokens} of them cached)")

    names = sorted(path.name for path in IMAGES.glob("*.png"))
    stream = ({"messages": [user("Describe this image.", name)], "request_id": name} for name in names)
    for output in llm.stream_multimodal(stream, SamplingParams(max_tokens=64)):
        print(f"{output.request_id}: {output.text}")


if __name__ == "__main__":
    main()
