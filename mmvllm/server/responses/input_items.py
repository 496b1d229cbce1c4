"""Converts the input of a stored response to items of OpenAI's Responses API."""

from typing import Any

from mmvllm.server.errors import ApiError
from mmvllm.server.responses.protocol import InputItems
from mmvllm.server.responses.store import StoredResponse

_PARTS = {"assistant": "output_text"}  # types of text parts by role; the default is input_text


def page_of_input(stored: StoredResponse, response_id: str, limit: int, order: str, after: str | None) -> bytes:
    """Return at most `limit` items as JSON, starting after the item with the id `after`; `order` is asc or desc.

    Raises ApiError if there is no item with this id.
    """
    items = _items(stored, response_id)[:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"after is {after!r:.100}, which is not the id of an item", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = items[begin : begin + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    page = InputItems(data=shown, first_id=first_id, last_id=last_id, has_more=begin + limit < len(items))
    return page.model_dump_json().encode()


def _items(stored: StoredResponse, response_id: str) -> list[dict[str, Any]]:
    calls = (call for message in stored.messages for call in message.get("tool_calls", ()))
    custom = {call["id"] for call in calls if call["type"] == "custom"}
    made = []
    for message in stored.given:
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
