"""Requests that the server refuses."""

from fastapi import FastAPI

from tests.helpers.serving.server import call, error_of

JSON = {"Content-Type": "application/json"}


def refusal(app: FastAPI, path: str, body: object, status: int = 400) -> dict:
    """The error of a request that is refused with this status; bytes are sent as they are."""
    sent = {"content": body, "headers": JSON} if isinstance(body, bytes) else {"json": body}
    answer = call(app, "POST", path, **sent)
    assert answer.status_code == status, answer.text
    return error_of(answer)


def check_refusal(app: FastAPI, path: str, body: object, param: str | None, words: str) -> None:
    """Check the field that the error names, and that its message has the words; an unknown model is a 404."""
    error = refusal(app, path, body, 404 if param == "model" else 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error") and words in error["message"], error
