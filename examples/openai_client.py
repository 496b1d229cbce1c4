"""Ask a server about images and videos with the `openai` client, and print the completion as it is streamed.

    pip install ".[serve]" openai
    mmvllm serve &
    python examples/openai_client.py examples/images/scene-04.png "How many stars are there?"

Set OPENAI_BASE_URL for another server, and OPENAI_API_KEY for its key.
"""

import argparse
import base64
import mimetypes
import os
from pathlib import Path

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ImportError:
    raise SystemExit("this example needs the openai package: pip install openai") from None


def media_part(path: Path) -> dict:
    kind = mimetypes.guess_type(path)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    name = "video_url" if kind.startswith("video/") else "image_url"
    return {"type": name, name: {"url": f"data:{kind};base64,{data}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="images and videos")
    parser.add_argument("question")
    args = parser.parse_args()
    for path in args.files:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [*map(media_part, args.files), {"type": "text", "text": args.question}],
            }
        ],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n({chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out)")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as error:
        raise SystemExit(f"no server answers at {error.request.url}; start one with: mmvllm serve") from None
    except APIStatusError as error:
        raise SystemExit(f"the server refused the request: {error.message}") from None
