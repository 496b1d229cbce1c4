"""Let a model call functions of this program: a loop of requests, calls and their results.

    pip install ".[serve,structured]" openai
    mmvllm serve --model Qwen/Qwen3-VL-4B-Instruct &
    python examples/tool_calls.py "What is 17 times 23, and which shapes are red?" --image examples/images/scene-04.png

The bundled model was not trained to call functions: with it, --tool-choice required shows that every call fits its
function. Set OPENAI_BASE_URL for another server, and OPENAI_API_KEY for its key.
"""

import argparse
import base64
import json
import os
from pathlib import Path

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ImportError:
    raise SystemExit("this example needs the openai package: pip install openai") from None

NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def tool(name: str, description: str, **properties: dict) -> dict:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("add", "The sum of two numbers.", a=NUMBER, b=NUMBER),
    tool("multiply", "The product of two numbers.", a=NUMBER, b=NUMBER),
]
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}


def content_of(question: str, image: Path | None) -> list[dict]:
    parts = [{"type": "text", "text": question}]
    if image is not None:
        data = base64.b64encode(image.read_bytes()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--tool-choice", choices=["auto", "required"], default="auto", help="for the first request")
    args = parser.parse_args()
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": content_of(args.question, args.image)}]
    choice = args.tool_choice
    for _ in range(5):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        )
        message, choice = answer.choices[0].message, "auto"
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as error:
        raise SystemExit(f"no server answers at {error.request.url}; start one with: mmvllm serve") from None
    except APIStatusError as error:
        raise SystemExit(f"the server refused the request: {error.message}") from None
