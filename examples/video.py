"""Ask about a video: sampled evenly, about a part of it, and beside an image.

pip install ".[video]" && python examples/video.py [VIDEO]
"""

import argparse
from pathlib import Path

from mmvllm import LLM, SamplingParams

EXAMPLES = Path(__file__).parent


def ask(question: str, *parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", nargs="?", default=EXAMPLES / "videos/scenes.mp4", help="a path or a URL")
    parser.add_argument("--model", help="a checkpoint folder or a hub id; the bundled model only knows still images")
    args = parser.parse_args()
    video = {"type": "video", "video": args.video}
    image = {"type": "image", "image": EXAMPLES / "images/scene-04.png"}
    requests = [
        ask("Describe this video.", video),  # two frames per second
        ask("Describe this video.", {**video, "nframes": 4, "video_end": 2.9}),
        ask("Is the image part of the video?", {**video, "fps": 1}, image),
    ]
    with LLM(args.model) as llm:
        for output in llm.generate_multimodal(requests, SamplingParams(max_tokens=64)):
            print(f"{output.num_video_tokens} tokens of video: {output.text}")


if __name__ == "__main__":
    main()
