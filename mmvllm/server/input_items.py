"""The input of a stored response, as the items of OpenAI's Responses API."""

from collections.abc import Sequence
from typing import Any

_PARTS = {"assistant": "output_text"}  # types of text parts by roles, if not input_text


def input_items(given: Sequence[dict], conversation: Sequence[dict], response_id: str) -> list[dict[str, Any]]:
    """Convert the last messages of a conversation, as `messages_of` makes them, to items with ids, in their order."""
    calls = (call for message in conversation for call in message.get("tool_calls", ()))
    custom = {call["id"] for call in calls if call["type"] == "custom"}
    made = []
    for message in given:
        role, content = message["role"], message["content"]
        if role == "tool":
            output = content if isinstance(content, str) else [_part(part, role) for part in content]
            kind = "custom_tool_call_output" if message["tool_call_id"] in custom else "function_call_output"
            made.append({"type": kind, "call_id": message["tool_call_id"], "output": output})
        elif content:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            made.append({"type": "message", "role": role, "content": [_part(part, role) for part in parts]})
        made += [_call(call) for call in message.get("tool_calls", ())]
    return [{"id": f"item_{response_id}_{i}", "status": "completed"} | item for i, item in enumerate(made)]


def _call(call: dict) -> dict[str, Any]:
    kind = {"function": "function_call", "custom": "custom_tool_call"}[call["type"]]
    return {"type": kind, "call_id": call["id"], **call[call["type"]]}


def _part(part: dict, role: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": _PARTS.get(role, "input_text"), "text": part["text"]}
    return {
        "type": "input_image",
        "image_url": part["image_url"]["url"],
        "detail": part["image_url"]["detail"] or "auto",
    }
