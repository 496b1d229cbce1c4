"""Parses request bodies as strict JSON; Python's parser accepts more than the standard and drops duplicate keys."""

import asyncio
import codecs
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any, get_args
from weakref import WeakKeyDictionary

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from mmvllm.server.errors import MAX_KEY_SHOWN, ApiError, out_of_memory
from mmvllm.server.http.large_bodies import MAX_TEXT_BYTES, restored, set_aside
from mmvllm.utils.text import refuse_constant, with_whole_characters

logger = logging.getLogger(__name__)
MANY_BYTES = 100_000  # a body of this size, of small items, is parsed in a few milliseconds
_PARSING = ThreadPoolExecutor(1, "mmvllm-parse")  # several threads would compete with the event loop for the GIL
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LOGGED: set[str] = set()  # names of ignored fields
MAX_LOGGED = 100
MAX_KEYS = 1024  # per object; each unknown key produces an error
MAX_COMMAS = 1_000_000  # once parsed, small items take 30 times their size in memory
MAX_DIGITS = 500  # of an integer; the time to parse one grows with the square of its length
MAX_ESCAPES = 5_000_000  # each takes as long to parse as dozens of characters; some clients escape slashes of base64
MAX_BRACKETS = 100_000  # a list or object takes as long to parse as dozens of numbers


class StrictRequest(Request):
    """A request that parses its body with `parse`, in a thread if the body is large, so the event loop continues."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < MANY_BYTES:
            return parse(body)
        loop = asyncio.get_running_loop()
        turn = _TURNS.setdefault(loop, asyncio.Lock())
        await turn.acquire()
        try:
            return await loop.run_in_executor(_PARSING, parse, body)
        finally:
            # Release the turn after the caller has validated this body. Validating many bodies in a row would block the
            # event loop for seconds, and parsed values take far more memory than bodies.
            loop.call_soon(turn.release)


class StrictRoute(APIRoute):
    """A route that parses request bodies with `parse`."""

    request_class = StrictRequest

    @cached_property
    def fields(self) -> frozenset[str]:
        """All fields that the body of a request may have, in any of its forms."""
        fields_by_form, _ = self._forms
        return frozenset(chain.from_iterable(fields_by_form.values()))

    def fields_of(self, body: dict) -> frozenset[str]:
        """Return the fields that a body of the same form as `body` may have."""
        fields_by_form, form_of = self._forms
        return fields_by_form[form_of(body)]

    @cached_property
    def _forms(self) -> tuple[dict[str, frozenset[str]], Callable[[dict], str]]:
        """The fields of each form of the body, by tag in a union of models, and a function that tags a body."""
        body = inspect.signature(self.endpoint).parameters.get("body")
        if body is None or isinstance(body.annotation, type):
            return {"": frozenset() if body is None else _fields_of(body.annotation)}, lambda _: ""
        union, tags = get_args(body.annotation)
        models = (get_args(form) for form in get_args(union))
        return {tag.tag: _fields_of(model) for model, tag in models}, tags.discriminator

    def get_route_handler(self) -> Callable:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(self.request_class(request.scope, request.receive))

        return handle


class LenientRequest(StrictRequest):
    """A request whose unknown fields are ignored; the first `MAX_LOGGED` of them are logged once each."""

    async def json(self) -> Any:
        value = await super().json()
        if not isinstance(value, dict):
            return value
        known = self.scope["route"].fields_of(value)
        _log_ignored(value.keys() - known)
        return {name: item for name, item in value.items() if name in known}


class LenientRoute(StrictRoute):
    """A route that ignores the unknown fields of its requests."""

    request_class = LenientRequest


def _log_ignored(names: Collection[str]) -> None:
    new = sorted({name[:MAX_KEY_SHOWN] for name in names} - _LOGGED)
    for name in new[: MAX_LOGGED - len(_LOGGED)]:
        _LOGGED.add(name)
        logger.warning("requests have the field %r, which is ignored; logged once", name)


def _fields_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def parse(body: bytes) -> Any:
    """Parse a body; raises ApiError for JSON that is invalid, too deeply nested, ambiguous or slow to parse.

    Apart from data URIs, a body may have at most `MAX_TEXT_BYTES`.
    """
    body, strings = set_aside(body) if len(body) > MAX_TEXT_BYTES else (body, {})
    if body.count(b",") > MAX_COMMAS:
        raise ApiError(400, f"the body has more than {MAX_COMMAS} items")
    if (num_escapes := body.count(b"\\")) > MAX_ESCAPES:
        raise ApiError(400, f"the body has more than {MAX_ESCAPES} backslashes")
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise ApiError(
            400, f"the body has more than {MAX_BRACKETS} opening brackets, of lists or objects or in strings"
        )
    try:
        text = body.removeprefix(codecs.BOM_UTF8).decode()
        parse_int = _int if _may_have_long_integer(body) else None  # it would be called for each of a million integers
        value = json.loads(text, object_pairs_hook=_object, parse_int=parse_int, parse_constant=refuse_constant)
        value = with_whole_characters(value) if num_escapes and _has_half_pairs(text, value) else value
        return restored(value, strings) if strings else value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except MemoryError:
        raise out_of_memory() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {_reason(error)}") from None


def _has_half_pairs(text: str, value: Any) -> bool:
    """Return whether strings of a value, whose JSON is `text`, contain lone surrogates."""
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _reason(error: ValueError) -> str:
    return "it is not valid Unicode" if isinstance(error, UnicodeError) else str(error)


def _may_have_long_integer(body: bytes) -> bool:
    """Return whether there may be more than `MAX_DIGITS` digits in a row.

    Such a row covers one of the sampled bytes, with half of `MAX_DIGITS` digits on one side of it. A regular expression
    would hold the GIL for seconds.
    """
    half = MAX_DIGITS // 2
    places = range(0, len(body), MAX_DIGITS + 1)
    return any(body[max(0, at - half) : at + 1].isdigit() or body[at : at + half + 1].isdigit() for at in places)


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer must have at most {MAX_DIGITS} digits, got {len(text)}")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    if len(pairs) > MAX_KEYS:
        raise ApiError(400, f"an object of the body must have at most {MAX_KEYS} keys, got {len(pairs)}")
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has the same key twice")
    return made
