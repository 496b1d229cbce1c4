"""Checks JSON schemas for keywords that llguidance enforces; other keywords, some of which it ignores, are refused."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import islice
from math import lcm
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.structured.grammar_cost import MAX_CHAIN, TOO_COSTLY, is_costly, longest_chain
from mmvllm.utils.arguments import is_number

ENFORCED = frozenset(
    (
        *("type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$anchor", "$comment", "$vocabulary", "discriminator", "propertyOrdering"),
        *("contentEncoding", "contentMediaType", "contentSchema", "strict"),
    )
)
FORMATS = frozenset(  # that llguidance knows
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_DEMANDING_NOTHING = {  # unenforced keywords, and the values with which they have no effect
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "nullable": (False,),
    "not": (False,),
}
# An expression without a look-around, a back-reference or \b, which llguidance does not support. In a character class
# these have no such meaning; an unclosed class extends to the end of the expression.
_ENFORCED_PATTERN = re.compile(
    r"(?:\\[^1-9kbB]|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\((?!\?(?:<?[=!]|P=))|[^\\\[(])*+\\?", re.DOTALL
)
MAX_SCHEMAS = 2000  # within a schema; checking all of them takes 30 ms
MAX_PATTERNS = 12  # in combined schemas: compiling a conjunction of n expressions takes 2^n steps
MAX_MULTIPLE = 2**53  # larger integers are not exact in float64
MAX_REMAINDERS = 10_000  # 0.05 s; each is a lexer state, as is each pair, triple ... if schemas are combined
MAX_PRODUCT = 100_000  # 40 MB
MAX_PAIRS = 10_000  # 0.1 s
LARGEST_INTEGER = 2**53  # float64 represents all integers up to this one
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PROPERTIES = ("properties", "patternProperties")
_OF_ONE, _OF_LISTS = ("additionalProperties", "items", "additionalItems"), ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_Path = tuple[str | int, ...]
_VALUES = ("const", "default", "examples", "example")  # keywords whose value may be null


def without_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keywords and properties whose value is null, which schema generators write for absent ones."""
    made = {}
    for keyword, value in schema.items():
        if keyword in _VALUES or (keyword == "enum" and value is not None):
            made[keyword] = value
        elif keyword in _OF_NAMES and isinstance(value, Mapping):
            made[keyword] = {name: _without_nulls(part) for name, part in value.items() if part is not None}
        elif value is not None:
            made[keyword] = _without_nulls(value)
    return made


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_nulls(value)
    return [_without_nulls(part) for part in value] if isinstance(value, list | tuple) else value


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keywords without effect, and alternatives that cannot be enforced, from a schema.

    An unknown `format` has no effect, as JSON Schema specifies. An alternative of `anyOf` whose `pattern` cannot be
    enforced becomes false if others remain; a text that fits the result also fits the schema. This need not hold with
    `oneOf`, so a schema with `oneOf` keeps all alternatives.
    """
    return _enforceable(schema, not any("oneOf" in part for _, part in _parts(schema)))


def _enforceable(schema: Any, drops: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    schema, made = _with_near_bounds(_with_null(schema)), {}
    for keyword, value in schema.items():
        if _demands_nothing(keyword, value):
            continue
        if keyword == "anyOf" and isinstance(value, list) and drops and not all(map(_has_unenforced_pattern, value)):
            value = [False if _has_unenforced_pattern(part) else part for part in value]
        if keyword in (*_OF_ONE, *_OF_LISTS):
            is_list = isinstance(value, list)
            made[keyword] = [_enforceable(part, drops) for part in value] if is_list else _enforceable(value, drops)
        elif keyword in _OF_NAMES and isinstance(value, Mapping):
            made[keyword] = {name: _enforceable(part, drops) for name, part in value.items()}
        else:
            made[keyword] = value
    return made


def _with_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add null to the types of a schema that has a `type` and is `nullable` as in OpenAPI 3.0."""
    if schema.get("nullable") is not True or not isinstance(kind := schema.get("type"), str):
        return schema
    made = {name: value for name, value in schema.items() if name != "nullable"} | {"type": [kind, "null"]}
    if isinstance(values := schema.get("enum"), list) and None not in values:
        made["enum"] = [*values, None]
    return made


def _with_near_bounds(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tighten the bounds of integers to the range that llguidance can represent, which is smaller than 64 bits."""
    if _kinds(schema) == {"number"}:
        return schema
    near = {}
    for name in _BOUNDS:
        sign = 1 if "aximum" in name else -1
        if is_number(value := schema.get(name)) and value * sign > LARGEST_INTEGER:
            near[name] = sign * LARGEST_INTEGER
    return {**schema, **near}


def _demands_nothing(keyword: str, value: Any) -> bool:
    if keyword == "x-guidance":  # llguidance would take it for options
        return True
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    return isinstance(value, bool | dict) and value in _DEMANDING_NOTHING.get(keyword, ())


def _has_unenforced_pattern(part: Any) -> bool:
    return isinstance(part, Mapping) and not _is_enforced(part.get("pattern"))


def _is_enforced(pattern: Any) -> bool:
    return not isinstance(pattern, str) or _ENFORCED_PATTERN.fullmatch(pattern) is not None


def num_schemas(schema: Any) -> int:
    """Return the number of schemas in a schema, including itself, counted up to `MAX_SCHEMAS` + 1."""
    return sum(1 for _ in islice(_parts(schema), MAX_SCHEMAS + 1))


def check_keywords(schema: dict[str, Any]) -> None:
    """Raise RequestError that names the first keyword that cannot be enforced, and its location."""
    for path, part in _parts(schema):
        for keyword, patterns in _expressions_in(part):
            if not all(map(_is_enforced, patterns)):
                reason = "has a look-around, a back-reference or \\b, and cannot be enforced"
                raise _refused(keyword, path, reason)
        for keyword in part:
            if not (keyword in ENFORCED or keyword in ANNOTATIONS or str(keyword).startswith("x-")):
                raise _refused(keyword, path, "cannot be enforced")
        most, required = part.get("minProperties", 0), part.get("required")
        # A text may repeat an additional key, which counts as one property.
        if isinstance(most, int) and most > (len(set(map(str, required))) if isinstance(required, list) else 0):
            raise _refused("minProperties", path, "can be enforced only up to the number of required properties")
        others = isinstance(part.get("items"), list) or "additionalItems" in part
        if "prefixItems" in part and others:  # from an earlier draft, which ignores prefixItems
            raise _refused("prefixItems", path, "cannot be enforced beside additionalItems or a list of items")
    check_cost(schema)


def _expressions_in(part: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (keyword, regular expressions) pairs."""
    named = part.get("patternProperties")
    yield "pattern", [part.get("pattern")]
    yield "patternProperties", [*named] if isinstance(named, dict) else []


def check_cost(schema: dict[str, Any]) -> None:
    """Raise RequestError for a keyword that takes too long to compile; llguidance's limits do not bound this time."""
    _check_numbers(schema)
    _check_depth(schema)
    _check_bounds(schema)
    _check_conjunctions(schema)
    _check_multiples(schema)
    _check_products(schema)
    num_pairs = 0
    for path, part in _parts(schema):
        named = part.get("patternProperties")
        num_pairs += len(named) ** 2 if isinstance(named, dict) else 0
        if num_pairs > MAX_PAIRS:
            reason = f"has, with others, too many expressions, which are compared in more than {MAX_PAIRS} pairs"
            raise _refused("patternProperties", path, reason)
        for keyword, patterns in _expressions_in(part):
            joined = "".join(pattern for pattern in patterns if isinstance(pattern, str))
            if joined and is_costly(joined):
                raise _refused(keyword, path, f"has {TOO_COSTLY}")


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse integers that float64 cannot represent: llguidance rounds them, and fails on some."""
    for path, part in _parts(schema):
        kinds = _kinds(part)
        for name in _BOUNDS:
            if is_number(value := part.get(name)) and abs(value) > LARGEST_INTEGER and kinds != {"number"}:
                raise _refused(name, path, f"has to be in [-2**53, 2**53], got {value!r:.40}")
        for name in ("const", "enum"):
            if _has_larger(part.get(name)):
                raise _refused(name, path, "has a number beyond 2**53; write the numbers as strings")


def _kinds(part: Mapping[str, Any]) -> set[Any]:
    kinds = part.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _has_larger(value: Any) -> bool:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        elif is_number(one) and abs(one) > LARGEST_INTEGER:
            return True
    return False


def _check_depth(schema: dict[str, Any]) -> None:
    """Refuse references that are nested too deeply, since llguidance follows them recursively."""
    depths: dict[str, int] = {}  # by definition; "" is the schema itself
    references: dict[str, list[str]] = {}
    for path, part in _parts(schema):
        is_inner = path[:1] in (("$defs",), ("definitions",))
        owner = "/".join(map(str, path[:2])) if is_inner else ""
        depths[owner] = max(depths.get(owner, 0), len(path) + 1 - 2 * is_inner)
        if isinstance(reference := part.get("$ref"), str):
            target = "/".join(reference.partition("#")[2].strip("/").split("/")[:2])
            references.setdefault(owner, []).append(target)
    if longest_chain(depths, references) > MAX_CHAIN:
        raise _refused("$ref", (), f"leads, with others, more than {MAX_CHAIN} levels deep")


def _check_bounds(schema: dict[str, Any]) -> None:
    """Refuse an exclusive integer bound less than 1 from the opposite bound: llguidance would include the integer.

    If schemas are combined, the opposite bound may be in any part of the schema.
    """
    parts = list(_parts(schema))
    combines = any(_combines(part) for _, part in parts)
    everywhere = {
        is_low: sorted(bound for _, part in parts for bound in _bounds(part, is_low)) for is_low in (True, False)
    }
    for path, part in parts:
        if not (combines or not _kinds(part) or "number" in _kinds(part)):
            continue
        for name, is_low in (("exclusiveMinimum", True), ("exclusiveMaximum", False)):
            value = part.get(name)
            if not is_number(value) or not (isinstance(value, int) or value.is_integer()):
                continue
            near = (value, value + 1) if is_low else (value - 1, value)
            others = everywhere[not is_low] if combines else sorted(_bounds(part, not is_low))
            if _has_between(others, *near) and not _has_between(sorted(_bounds(part, is_low)), *near):  # none stricter
                reason = "cannot be enforced beside another bound less than 1 away; write a bound that is included"
                raise _refused(name, path, reason)


def _bounds(part: dict[str, Any], is_low: bool) -> list[float]:
    names = ("minimum", "exclusiveMinimum") if is_low else ("maximum", "exclusiveMaximum")
    return [part[name] for name in names if is_number(part.get(name))]


def _has_between(numbers: list[float], low: float, high: float) -> bool:
    """Return whether a sorted list has a number strictly between `low` and `high`."""
    i = bisect_right(numbers, low)
    return i < len(numbers) and numbers[i] < high


def _combines(part: dict[str, Any]) -> bool:
    """Return whether a value may have to fit several schemas."""
    several = [name for name in ("anyOf", "oneOf", "$ref") if name in part]
    has_others = bool(part.keys() & ENFORCED - {"$defs", "definitions", *several})
    of_names = "properties" in part and "patternProperties" in part
    return len(several) + (has_others and bool(several)) > 1 or "allOf" in part or of_names


def _check_multiples(schema: dict[str, Any]) -> None:
    remainders = 1
    for path, part in _parts(schema):
        if is_number(value := part.get("multipleOf")) and value > 0:
            remainders = lcm(remainders, _num_remainders(value)) if value <= MAX_MULTIPLE else value
            if remainders > MAX_REMAINDERS:
                reason = "is too large, or has too few factors in common with others, to be enforced; use a smaller one"
                raise _refused("multipleOf", path, reason)


def _check_products(schema: dict[str, Any]) -> None:
    """Refuse too many properties beside too many alternatives: each alternative is compiled with all properties."""
    for path, part in _parts(schema):
        num_properties = sum(len(part[name]) for name in _PROPERTIES if isinstance(part.get(name), dict))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(keyword), list) and num_properties * len(part[keyword]) > MAX_PRODUCT:
                product = f"{len(part[keyword])} members beside {num_properties} properties"
                raise _refused(keyword, path, f"has {product}; their product must be at most {MAX_PRODUCT}")


def _num_remainders(value: float) -> int:
    """Estimate the lexer states that remainders take; those for factors of 2 and 5 depend on the last digits only."""
    digits = int("".join(map(str, Decimal(str(value)).as_tuple().digits)))
    while digits % 10 == 0:
        digits //= 10
    powers = 1
    for factor in (2, 5):
        while digits % factor == 0:
            digits, powers = digits // factor, powers * factor
    return digits * max(1, powers // 64)  # such a state takes less


def _check_conjunctions(schema: dict[str, Any]) -> None:
    parts = list(_parts(schema))
    patterns = [(name, path) for path, part in parts for name in ("pattern", "format") if name in part]
    if len(patterns) > MAX_PATTERNS and any(_is_conjunction(part) for _, part in parts):
        reason = (
            f"is one of {len(patterns)}; beside allOf, or a $ref with other keywords, {MAX_PATTERNS} can be enforced"
        )
        raise _refused(*patterns[MAX_PATTERNS], reason)


def _is_conjunction(part: dict[str, Any]) -> bool:
    """Return whether a text must fit several schemas at once."""
    both = part.get("allOf")
    num_schemas = (len(both) if isinstance(both, list) else 0) + ("$ref" in part)
    has_others = any(keyword in ENFORCED - {"allOf", "$ref", "$defs", "definitions"} for keyword in part)
    return num_schemas + has_others > 1 and num_schemas > 0


def _refused(keyword: Any, path: _Path, reason: str) -> RequestError:
    pointer = "".join(f"/{name}" for name in path)
    message = f"structured.json has the keyword {keyword!r:.100} at {pointer or '/':.200}, which {reason}"
    return RequestError(message, param="structured.json", value=keyword)


def _parts(schema: Any) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Yield every schema in a schema, with the names and indices that lead to it."""
    waiting: deque[tuple[_Path, Any]] = deque([((), schema)])
    while waiting:
        path, part = waiting.popleft()
        if isinstance(part, dict):
            yield path, part
            waiting += _inner(path, part)


def _inner(path: _Path, part: dict[str, Any]) -> Iterator[tuple[_Path, Any]]:
    for keyword, value in part.items():
        if keyword in _OF_ONE and isinstance(value, dict):
            yield (*path, keyword), value
        elif keyword in (*_OF_LISTS, "items") and isinstance(value, list):
            yield from (((*path, keyword, i), one) for i, one in enumerate(value))
        elif keyword in _OF_NAMES and isinstance(value, dict):
            yield from (((*path, keyword, name), one) for name, one in value.items())
