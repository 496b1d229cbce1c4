"""JSON that means one thing, or a 400: Python's reader takes more than the standard, and lets later keys win."""

import json
import re
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from mmvllm.server.errors import ApiError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_KEYS = 1000  # of one object; every unknown one becomes an error
MAX_COMMAS = 2_000_000  # small items take thirty times their size, and the event loop's time
MAX_BRACKETS = 100_000  # each list or object takes as long as dozens of numbers


class StrictRequest(Request):
    """A request whose body is read by `parse`."""

    async def json(self) -> Any:
        return parse(await self.body())


class StrictRoute(APIRoute):
    """A route whose bodies are read by `parse`."""

    def get_route_handler(self) -> Callable:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


def parse(body: bytes) -> Any:
    """Raises ApiError for what is no JSON, is nested too deep, or has NaN, a key twice or half a surrogate pair."""
    if body.count(b",") > MAX_COMMAS:
        raise ApiError(400, f"the body has more than {MAX_COMMAS} items")
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise ApiError(400, f"the body has more than {MAX_BRACKETS} lists and objects, or brackets in its texts")
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # a half one cannot be encoded
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {_reason(error)}") from None


def _reason(error: ValueError) -> str:
    return "it is not valid Unicode" if isinstance(error, UnicodeError) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are read")
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has the same key twice")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
