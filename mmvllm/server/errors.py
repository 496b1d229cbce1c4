"""Formats every error as OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response

from mmvllm.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    EngineStopped,
    EngineUnavailable,
    PromptTooLong,
    RequestFailed,
)
from mmvllm.server.disconnects import CLIENT_DISCONNECTED, ClientDisconnected
from mmvllm.utils.text import suggestion

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# These replace pydantic's messages; the names in braces are keys of the error's `ctx`.
MESSAGES = {
    "extra_forbidden": "is not a field of this request",
    "missing": "is missing",
    # Content parts are the only union whose tag can be invalid or missing.
    "union_tag_invalid": "must have the type 'text', 'image_url' or 'video_url', got {tag!r:.100}",
    "union_tag_not_found": "must have a type: 'text', 'image_url' or 'video_url'",
    "literal_error": "must be {expected}; nothing else is supported",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "too_short": "must have at least {min_length} item",
}
MAX_KEY_SHOWN = 100  # characters of a key in a message, which keeps a response smaller than its request
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error response; `param` names the invalid field, and `code` is machine-readable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def content(self) -> dict:
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.content()).encode()  # ASCII, since a message may quote a lone surrogate

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    message = f"the model {name!r:.100} does not exist; served: {' and '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


def from_engine(error: Exception) -> ApiError:
    """Return the error response to a request that the engine refused or did not finish, or that timed out."""
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error), code="engine_busy", headers={"Retry-After": "1"})
    if isinstance(error, EngineUnavailable):
        is_final = isinstance(error, EngineStopped | EngineFailed)  # otherwise engines are restarting
        return ApiError(503, str(error), code="engine_unavailable", headers=None if is_final else {"Retry-After": "1"})
    if isinstance(error, MemoryError):
        return out_of_memory()
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="deadline_exceeded")
    assert isinstance(error, RequestFailed), error
    return ApiError(500, str(error), code="request_failed")


@contextmanager
def engine_errors(format_error: Callable[[ValueError], tuple[str, str | None]]) -> Iterator[None]:
    """Convert the engine's exceptions to ApiError; `format_error` returns the message and the field of a ValueError."""
    try:
        yield
    except (EngineUnavailable, RequestFailed, DeadlineExceeded, MemoryError) as error:
        raise from_engine(error) from error
    except ValueError as error:
        code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, PromptTooLong) else None
        message, param = format_error(error)
        raise ApiError(400, message, param=param, code=code) from error


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in an ApiError about a converted request to the names in the client's request."""
    try:
        yield
    except ApiError as error:
        error.param, error.detail = error.param and renamed(error.param, names), renamed(error.detail, names)
        raise


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return the text with each of `names` replaced by its value, in order.

    Only whole words outside quotation marks are replaced: quotes repeat the client's words.
    """
    pieces = re.split(r"""("[^"]*"|(?<!\w)'[^']*')""", text)
    for name, own in names.items():
        begins = r"(?<!\w)" if name[0].isalpha() else ""
        pieces[::2] = [re.sub(rf"{begins}{re.escape(name)}(?!\w)", own, piece) for piece in pieces[::2]]
    return "".join(pieces)


def internal_error() -> ApiError:
    """Return the error response to an unexpected exception, without details."""
    return ApiError(500, "internal server error; see the server's log")


def out_of_memory() -> ApiError:
    """Return the error response to a request for which the server lacks memory."""
    message = "not enough memory for this request; try again later, or send less at once"
    return ApiError(503, message, code="out_of_memory", headers={"Retry-After": "1"})


def install(app: FastAPI) -> None:
    """Register handlers that turn every exception into an OpenAI error object."""

    async def from_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        message = {
            404: f"{request.scope['path']:.200} does not exist; /openapi.json describes the routes",
            405: f"{request.scope['path']:.200} does not support {request.method:.20}",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def from_validation(request: Request, error: RequestValidationError) -> Response:
        source, *path = error.errors()[0]["loc"]
        if source == "query":
            return ApiError(400, f"{path[0]}: {_message(error.errors()[0])}", param=path[0]).response()
        if error.body is None:
            return ApiError(400, "the body is empty; send the request as JSON").response()
        if isinstance(error.body, bytes):
            return ApiError(415, "the body must be JSON, with the header Content-Type: application/json").response()
        param, message = explain(error.errors(), error.body)
        if message == MESSAGES["extra_forbidden"] and param in error.body:
            message += suggestion(param, request.scope["route"].fields - {param})  # another form may have it
        return ApiError(400, f"{param}: {message}" if param else message, param=param).response()

    async def from_disconnect(_request: Request, _error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_DISCONNECTED)  # nobody reads it

    async def from_memory(_request: Request, _error: MemoryError) -> Response:
        return out_of_memory().response()

    async def from_other(_request: Request, _error: Exception) -> Response:
        return internal_error().response()

    app.add_exception_handler(HTTPException, from_http)
    app.add_exception_handler(RequestValidationError, from_validation)
    app.add_exception_handler(ClientDisconnected, from_disconnect)
    app.add_exception_handler(MemoryError, from_memory)
    # FastAPI's handler for Exception runs outside all middleware: its response would lack x-request-id and CORS.
    app.add_middleware(ServerErrorMiddleware, handler=from_other)


def explain(errors: list[dict], body: Any) -> tuple[str | None, str]:
    """Return the path of the invalid field and a message, from pydantic's errors.

    A value that matches no member of a union has errors for every member; the deepest belongs to the intended one.
    """
    found = [(_path(error, body), _message(error)) for error in errors]
    deepest = max(len(path) for path, _ in found)
    path = next(path for path, _ in found if len(path) == deepest)
    messages = dict.fromkeys(message for other, message in found if other == path)
    return _format_path(path) or None, ", or ".join(messages)


def _message(error: dict) -> str:
    return MESSAGES[error["type"]].format(**error.get("ctx", {})) if error["type"] in MESSAGES else error["msg"]


def _path(error: dict, body: Any) -> tuple[str | int, ...]:
    """Return the keys and indices from the body to the field, without the union tags that pydantic adds."""
    path, value, location = [], body, error["loc"][1:]
    for i, step in enumerate(location):
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
        elif error["type"] != "missing" or i + 1 < len(location):
            continue
        path.append(step)
    return tuple(path)


def _format_path(path: tuple[str | int, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step:.{MAX_KEY_SHOWN}}" for step in path)
    return "".join(steps).removeprefix(".")
