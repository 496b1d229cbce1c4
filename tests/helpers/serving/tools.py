"""Functions that chats may call, and a call of one."""


def tool(name: str, strict: bool | None = None, **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


COUNT = tool("count", shape={"enum": ["star", "circle"]}, most={"type": "integer", "minimum": 1, "maximum": 9})
FIND = tool("find", color={"enum": ["red", "green"]})
NAMED, NAMED_COUNT = ({"type": "function", "function": {"name": name}} for name in ("find", "count"))
CALL = '<tool_call>\n{"name": "count", "arguments": {"shape": "star", "most": 5}}\n</tool_call>'
