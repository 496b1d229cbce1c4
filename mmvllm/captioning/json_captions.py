"""Captions that are JSON of a schema: parses them into the records' objects, and makes table columns of the keys."""

import json
import re
import sys
from typing import Any
from urllib.parse import unquote

from mmvllm.errors import ArgumentError, RequestError
from mmvllm.structured.params import StructuredOutputsParams
from mmvllm.utils.arguments import is_number
from mmvllm.utils.text import parse_json, refuse_constant

OBJECT = "object"  # field of a record with a schema: the parsed caption, None if it was cut short
TEXTS = list[str]  # the kind of a column whose cells are lists of texts
_KINDS = {"string": str, "integer": int, "number": float, "boolean": bool}
_INT64 = 2**63
_INDEX = re.compile("[0-9]{1,9}")
MAX_LEVELS = 200  # nested lists and objects in a caption; Python parses about 1,000, fewer deep in the call stack


def schema_text(schema: Any, **texts: str | None) -> str | None:
    """Return a schema as JSON text; raises ArgumentError for an invalid schema, and for `texts` around captions."""
    if schema is None:
        return None
    if given := [name for name, text in texts.items() if text]:
        raise ArgumentError(f"{{{given[0]}}} puts text around captions, which are JSON with a {{schema}}")
    try:
        return StructuredOutputsParams(json=schema).json
    except RequestError as error:
        raise ArgumentError("{schema} {reason}", reason=error.reason.removeprefix("structured.json ")) from None


def with_object(record: dict) -> dict:
    """Return the record with its parsed caption as `object`."""
    return record | {OBJECT: None if record["caption"] is None else parsed(record["caption"])}


def parsed(text: str) -> Any:
    """Parse a caption, with numbers clamped to finite values; None if it was cut short or is nested too deeply."""
    try:
        value = parse_json(text, parse_float=_finite, parse_constant=refuse_constant)
    except ValueError:
        return None
    return value if _has_levels(value, MAX_LEVELS) else None


def _has_levels(value: Any, most: int) -> bool:
    """Return whether a value has at most this many levels of lists and objects."""
    level = [value]
    for _ in range(most + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return True
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return False


def is_cut(record: dict) -> bool:
    """Return whether a caption ended before its object was complete."""
    return OBJECT in record and record[OBJECT] is None and record["finish_reason"] == "length"


def object_columns(schema: str | None) -> dict[str, Any]:
    """Return column -> kind, for the object as JSON and for each of its keys that the schema names."""
    if schema is None:
        return {}
    properties = _resolved(json.loads(schema)).get("properties")
    named = properties if isinstance(properties, dict) else {}
    return {OBJECT: str} | {f"{OBJECT}.{name}": _kind(part) for name, part in named.items()}


def with_object_columns(record: dict, columns: dict[str, Any]) -> dict:
    """Return the record with the cells of `object_columns`."""
    made = record.get(OBJECT)
    keys = made if isinstance(made, dict) else {}
    cells = {name: _cell(keys.get(name.removeprefix(f"{OBJECT}.")), kind) for name, kind in columns.items()}
    return record | cells | ({OBJECT: _as_json(made)} if columns else {})


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _resolved(schema: Any) -> dict:
    """Return the schema, or the subschema that its `$ref` points to; {} if that is not an object of this schema.

    With an endpoint, nothing here has checked the schema, and the server may accept any schema.
    """
    found, reference = schema, schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str):
        document, _, pointer = unquote(reference).partition("#")
        if document:
            return {}
        for name in pointer.split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                return {}
    return found if isinstance(found, dict) else {}


def _kind(part: Any) -> Any:
    """Return the kind of a column: a Python type or `TEXTS`; str, for JSON text, if the schema has another type."""
    alternatives = part.get("anyOf") or part.get("oneOf") if isinstance(part, dict) else None
    if isinstance(alternatives, list) and alternatives:  # pydantic writes optional values like this
        kinds = [_kind(one) for one in alternatives if one != {"type": "null"}]
        return kinds[0] if len(kinds) == 1 else str
    names = part.get("type") if isinstance(part, dict) else None
    names = [name for name in names if name != "null"] if isinstance(names, list) else [names]
    if names == ["array"] and isinstance(part.get("items"), dict) and _kind(part["items"]) is str:
        return TEXTS
    return _KINDS.get(names[0], str) if len(names) == 1 and isinstance(names[0], str) else str


def _cell(value: Any, kind: Any) -> Any:
    """Return a value as the cell of a column of this kind; None if it does not fit.

    Servers that do not enforce the schema write such values, and integers may be too large for a column.
    """
    if value is None:
        return None
    if kind is str:
        return value if isinstance(value, str) else _as_json(value)
    if kind == TEXTS:
        return (
            [each if isinstance(each, str) else _as_json(each) for each in value] if isinstance(value, list) else None
        )
    if kind is float:
        return float(value) if is_number(value) and abs(value) <= sys.float_info.max else None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is kind and abs(value) < _INT64 else None


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)
