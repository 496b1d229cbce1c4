"""A client for OpenAI-compatible servers: sends a request for each prompt, and retries where that may help."""

import base64
import email.utils
import json
import logging
import os
import random
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

from mmvllm.errors import ArgumentError, RequestError
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.sampling_params import UNLIMITED, SamplingParams
from mmvllm.structured.params import StructuredOutputsParams
from mmvllm.utils.arguments import check_key
from mmvllm.utils.text import beginning_of, check_json_size, parse_json, printable
from mmvllm.utils.time_limit import TimeIsOver, TimeLimit, shut_down

logger = logging.getLogger(__name__)

KEY_VARIABLE = "OPENAI_API_KEY"
INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0  # seconds before a retry; each pause is about twice as long as the last
LONGEST_RETRY_AFTER = 300.0  # seconds that a server may ask for
CONNECT_SECONDS = 10.0
# Limits of an answer, per requested completion; a parsed answer takes at most about ten times as much memory.
MAX_BYTES = 1024 * 1024
MAX_VALUES = 100_000  # as `check_json_size` counts them
MAX_COMPLETIONS = 4  # the most that count, because an emoji quadruples the size of a text; also for a list of models
MAX_NAME = 512  # characters of a model's name
MAX_SHOWN = 2000  # characters of a list of models
MAX_COUNT = 2**31 - 1  # tokens
SHORTEST_SECRET = 8  # characters; keys such as "none" are not secret, and may be parts of other words
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)  # in JSON
_SECRET_NAME = re.compile("key|token|sig|secret|auth|code", re.IGNORECASE)  # of a parameter in a URL
_PROXY_LOGIN = re.compile(r"(?:[a-zA-Z0-9.+-]+:/+)?(.*)@")
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# Names of servers and gateways for a complete text, in lower case -> the name in records; all others are refused.
_FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "complete"), "eos"),
    **dict.fromkeys(("length", "max_tokens", "model_length", "limit"), "length"),
    "repetition": "repetition",
}
# The server gave up; a retry may help.
_RETRIED_REASONS = frozenset({"abort", "aborted", "cancelled", "error", "timeout", "insufficient_system_resource"})


# Fields that a job can do without -> the name that newer models have for them, None to leave them out.
_OPTIONAL = {
    "max_tokens": "max_completion_tokens",
    **dict.fromkeys(("max_completion_tokens", "temperature", "seed", "stop_on_repetition")),
}
_UNSUPPORTED = re.compile(
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|forbidden|does not belong"
    r"|not a field|cannot find field|deprecated",
    re.IGNORECASE,
)


class _TryAgain(Exception):
    """A failed attempt that a retry may fix; `seconds` is the pause that the server asks for."""

    def __init__(self, reason: str, seconds: float | None = None):
        super().__init__(reason)
        self.seconds = seconds


class Endpoint:
    """A model on an OpenAI-compatible server; thread-safe.

    The API key is read from the environment variable OPENAI_API_KEY; it is sent to the server, and written nowhere.
    Error messages, including the server's, show `***` instead of the key, or of a password or token in the URL, if it
    has at least eight characters.

    Args:
        url: the URL of the server, with or without /v1.
        model: the model's name on the server; None is the first of its /v1/models.
        timeout: seconds after which an attempt without a complete answer fails.
        max_retries: attempts of a request after the first one.

    Raises ArgumentError if the URL cannot be used, and if the server cannot be reached or does not have the model.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 300.0, max_retries: int = 5):
        key, base_url = os.environ.get(KEY_VARIABLE, "").strip(), _base_url(url)
        headers = {"Authorization": f"Bearer {check_key(KEY_VARIABLE, key)}"} if key else {}
        proxies = (_PROXY_LOGIN.match(url) for url in urllib.request.getproxies().values())
        login = base_url.userinfo.decode()
        logins = [login, *(found[1] for found in proxies if found)]
        secrets = [key, *(value for name, value in base_url.params.multi_items() if _SECRET_NAME.search(name))]
        secrets += [secret for login in logins for secret in _secrets_of(login)]
        self._secrets = [form for text in secrets if len(text) >= SHORTEST_SECRET for form in _forms(text)]
        self._timeout, self._max_retries = timeout, max_retries
        self._is_stopped = threading.Event()
        self._left_out: set[str] = set()  # fields that the server refuses; threads only add to it
        self._client = _client(
            base_url=base_url.copy_with(userinfo=b"", query=None),  # the client logs the URL of each request
            params=base_url.params,
            auth=(base_url.username, base_url.password) if login else None,
            headers=headers | {"Accept-Encoding": "identity"},  # a few compressed bytes may expand to any size
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # keeps no cookies
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS),  # per read; `_answer` limits the whole request
            # The caller limits the requests in flight; each request opens a new connection, see `_read`.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        try:
            self.model = self._chosen_model(model)
        except BaseException:
            self.close()
            raise

    def complete(self, messages: list[dict], params: SamplingParams, **fields: Any) -> RequestOutput | None:
        """Return the answer to a conversation, or an output with the error; None if `stop` came before an attempt."""
        body = {"model": self.model, "messages": messages, "temperature": params.temperature} | fields
        if params.max_tokens < UNLIMITED:
            body["max_tokens"] = params.max_tokens
        body |= {} if params.seed is None else {"seed": params.seed}
        body |= {} if params.n == 1 else {"n": params.n}
        body |= {"stop_on_repetition": True} if params.stop_on_repetition and self._is_own else {}
        body |= {} if params.structured is None else _schema_field(params.structured, self._is_own)
        begun = time.time()
        try:
            output = self._with_retries(lambda: self._output(self._post(body), params.n))
        except RequestError as error:
            output = RequestOutput("", error=str(error), exception=error.detached())
        if output is not None:
            output.arrival_time, output.finish_time = begun, time.time()
        return output

    def stop(self) -> None:
        """Begin no further request and no retry; may be called from a signal handler."""
        self._is_stopped.set()

    def close(self) -> None:
        """Drop the connections."""
        self._is_stopped.set()
        self._client.close()

    def _chosen_model(self, model: str | None) -> str:
        try:
            answer = self._answer("GET", "models", CONNECT_SECONDS, MAX_COMPLETIONS)
        except _TryAgain as error:
            raise ArgumentError("{endpoint} cannot be reached: {reason}", reason=error) from None
        if answer.status_code in (401, 403):
            raise ArgumentError(
                "{endpoint} refuses the request ({reason}); set the environment variable {variable} to an API key",
                reason=self._refusal(answer),
                variable=KEY_VARIABLE,
            )
        names, self._is_own = _model_names(answer), _is_own(answer)
        if model is None and not names:
            raise ArgumentError("{endpoint} does not list its models; give {endpoint_model}")
        if model is not None and names and model not in names:
            raise ArgumentError(
                "{endpoint} has no model {model!r}; it has {names}",
                model=model,
                names=beginning_of(printable(self._hidden(", ".join(names[:20]))), MAX_SHOWN),
            )
        name = model or names[0]
        if not name.isprintable() or len(name) > MAX_NAME or self._hidden(name) != name:
            raise ArgumentError(
                "{endpoint} lists a model with an invalid name: it has the API key or the password in it, control "
                "characters, or more than {most} characters",
                most=MAX_NAME,
            )
        return name

    def _refusal(self, answer: "_Answer") -> str:
        """Return the status, and the server's error message if it has a known form."""
        message = answer.reason_phrase if answer.error is None else answer.error.message
        return f"HTTP {answer.status_code}, {self._shown(message)}"

    def _shown(self, message: str) -> str:
        return printable(self._hidden(message)[:300])

    def _hidden(self, text: str) -> str:
        """Return a text for messages and records, without secrets that a server or the HTTP client put into it."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _checked(self, text: str) -> str:
        """Return a completion without secrets; raises RequestError if unescaping it as JSON would reveal a secret."""
        text = self._hidden(text)
        read = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2], text)
        if self._hidden(read) != read:
            raise RequestError("the endpoint's answer has the API key or the password in it")
        return text

    def _with_retries(self, attempt: Callable[[], RequestOutput]) -> RequestOutput | None:
        for number in range(self._max_retries + 1):
            if self._is_stopped.is_set():
                return None
            try:
                return attempt()
            except _TryAgain as error:
                if number == self._max_retries:
                    tries = f" ({number + 1} times)" if number else ""
                    raise RequestError(f"the endpoint failed{tries}: {error}") from None
                self._is_stopped.wait(_pause(number) if error.seconds is None else error.seconds)
        raise AssertionError("unreachable: the last try returns or raises")

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        sent = self._accepted(body)
        answer = self._answer("POST", "chat/completions", self._timeout, body.get("n", 1), json=sent)
        if answer.status_code in _AGAIN:
            raise _TryAgain(self._refusal(answer), _retry_after(answer))
        if answer.status_code in (400, 422) and self._leaves_out(answer, sent):
            return self._post(body)
        if answer.status_code != 200:
            raise RequestError(f"the endpoint refuses the request: {self._refusal(answer)}")
        try:
            content = answer.json()
        except ValueError:
            raise _TryAgain("its answer is not JSON") from None
        error = None if isinstance(content, dict) and content.get("choices") else _error_in(content)
        if error is not None:  # gateways report errors of the servers behind them with the status 200
            if error.code in map(str, _AGAIN):
                raise _TryAgain(self._shown(error.message), _retry_after(answer))
            raise RequestError(f"the endpoint refuses the request: {self._shown(error.message)}")
        return content

    def _accepted(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a request that the server accepts, under the names that it knows."""
        body = body.copy()
        for name in _OPTIONAL:  # `max_tokens` before the name that replaces it
            if name in self._left_out and name in body:
                value = body.pop(name)
                if (other := _OPTIONAL[name]) is not None:
                    body[other] = value
        return body

    def _leaves_out(self, answer: "_Answer", sent: dict[str, Any]) -> bool:
        """Return whether the server refuses an optional field, which is left out, or renamed, from now on."""
        error = answer.error
        if error is None or not _UNSUPPORTED.search(f"{error.code} {error.message}"):
            return False
        optional = [name for name in _OPTIONAL if name in sent]
        name = next((name for name in optional if name == error.param), None) or next(
            (name for name in optional if re.search(rf"\b{name}\b", error.message)), None
        )
        if name is None:
            return False
        if name not in self._left_out:
            self._left_out.add(name)
            instead = f"it is sent as {_OPTIONAL[name]}" if _OPTIONAL[name] else "it is left out"
            logger.warning("the endpoint refuses %s; %s: %s", name, instead, self._shown(error.message))
        return True

    def _answer(self, method: str, path: str, seconds: float, num_completions: int, **options: Any) -> "_Answer":
        """Return the answer to a request; raises _TryAgain if it fails, or is not complete after `seconds`."""
        limit, size = TimeLimit(seconds), min(num_completions, MAX_COMPLETIONS)
        try:
            return limit.run(lambda: self._read(limit, method, path, size, options))
        except (TimeIsOver, httpx2.TimeoutException):
            raise _TryAgain("it did not answer in time") from None
        except httpx2.HTTPError as error:
            raise _TryAgain(self._hidden(str(error) or type(error).__name__)) from None

    def _read(self, limit: TimeLimit, method: str, path: str, size: int, options: dict[str, Any]) -> "_Answer":
        """Return the answer; the connection is closed when the time is over, because a host may send slowly."""
        sockets: list[socket.socket] = []

        def keep_socket(event: str, info: dict[str, Any]) -> None:
            # TLS wraps the first socket in another one.
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                sockets.append(info["return_value"].get_extra_info("socket"))
                if limit.is_over:
                    shut_down(sockets)

        options |= {"extensions": {"trace": keep_socket}}
        with (
            limit.released_when_over(lambda: shut_down(sockets)),
            self._client.stream(method, path, **options) as response,
        ):
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                coding = printable(self._hidden(coding)[:100])
                raise _TryAgain(f"its answer is compressed ({coding}), which was not asked for")
            content = bytearray()
            for part in response.iter_raw():
                limit.check()
                content += part
                if len(content) > size * MAX_BYTES:
                    raise _TryAgain(f"its answer has more than {size * MAX_BYTES:,} bytes")
            return _Answer(response.status_code, response.reason_phrase, response.headers, bytes(content), size)

    def _output(self, answer: Any, n: int) -> RequestOutput:
        try:
            choices, usage = answer["choices"], answer.get("usage") or {}
            texts = [choice["message"].get("content") for choice in choices]
            reasons = [self._hidden(str(choice.get("finish_reason") or "stop"))[:100] for choice in choices]
            num_tokens, num_prompt_tokens = _count(usage, "completion_tokens"), _count(usage, "prompt_tokens")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise _TryAgain("its answer is not a chat completion") from None
        if len(choices) != n:
            raise RequestError(f"the endpoint returned {len(choices)} completions, but {n} were requested")
        for text, reason in zip(texts, reasons, strict=True):
            if reason.lower() in _RETRIED_REASONS:
                raise _TryAgain(f"a completion ended with the reason {reason!r}")
            if not isinstance(text, str) or reason.lower() not in _FINISH_REASONS:
                raise RequestError(f"the endpoint returned no complete text; the finish reason is {reason!r}")
        # The server reports only the total number of tokens, without ids: the first completion has all of them.
        completions = [
            CompletionOutput(self._checked(text), range(num_tokens if i == 0 else 0), _FINISH_REASONS[reason.lower()])
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return RequestOutput("", completions, num_prompt_tokens=num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A response that has been read to its end."""

    status_code: int
    reason_phrase: str
    headers: httpx2.Headers
    content: bytes
    size: int  # completions that the size limits allow for

    def json(self) -> Any:
        """Parse the content; raises ValueError if it is not JSON, or has too many values."""
        check_json_size(self.content, self.size * MAX_VALUES)
        return parse_json(self.content)

    @property
    def error(self) -> "_Error | None":
        """The error in the content, or None."""
        try:
            return _error_in(self.json())
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class _Error:
    """An error of a server: its text, and the name of the field and the code, if it has them."""

    message: str
    param: str | None = None
    code: str | None = None


def _error_in(content: Any, levels: int = 4) -> _Error | None:
    """Return the error in an answer, in the forms of OpenAI, FastAPI, Google, problem details and their like."""
    if isinstance(content, str):
        return _Error(content)
    if not levels or not content or not isinstance(content, dict | list):
        return None
    if isinstance(content, list):
        return _error_in(content[0], levels - 1)
    for name in ("error", "errors", "detail"):
        if content.get(name):
            inner = _error_in(content[name], levels - 1)
            code = content.get("code") or content.get("status")
            return inner if inner is None or inner.code or code is None else replace(inner, code=str(code))
    message = next((content[name] for name in ("message", "msg", "title") if content.get(name)), None)
    if message is None:
        return None
    place = content.get("loc") or content.get("param") or ""
    param = str(place[-1]) if isinstance(place, list) else str(place)
    code = content.get("code") or content.get("type") or content.get("status")
    return _Error(f"{message}", param or None, None if code is None else str(code))


def _client(**options: Any) -> httpx2.Client:
    try:
        return httpx2.Client(**options)
    except ImportError as error:  # a package for SOCKS is missing
        raise ArgumentError("{endpoint} cannot be reached through the proxy: {reason}", reason=error) from None
    except (ValueError, httpx2.InvalidURL):  # the error's text would show a password
        raise ArgumentError(
            "{endpoint} cannot be reached: HTTP_PROXY, HTTPS_PROXY or ALL_PROXY must be a URL such as "
            "http://proxy.example.org:3128"
        ) from None


def _secrets_of(login: str) -> tuple[str, ...]:
    """Return the secret forms of a login (USER:PASSWORD or a token): as in a URL, and as the client sends it."""
    user, _, password = login.partition(":")
    sent = base64.b64encode(urllib.parse.unquote_to_bytes(f"{user}:{password}")).decode()
    return sent, password or user, urllib.parse.unquote(password or user)


def _forms(secret: str) -> list[str]:
    """Return a secret in its plain form and in the forms that messages quote, the longest first."""
    forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")}
    return sorted(forms, key=len, reverse=True)


def _count(usage: dict, name: str) -> int:
    """Return a number of tokens; raises ValueError if it is not valid."""
    if not 0 <= (count := int(usage.get(name) or 0)) <= MAX_COUNT:
        raise ValueError(f"{name} is {count}")
    return count


def _base_url(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ArgumentError("{endpoint} must be an http:// or https:// URL, such as http://localhost:8000/v1")
    path = parsed.path.rstrip("/").removesuffix("/chat/completions")
    return parsed.copy_with(path=f"{path or '/v1'}/", fragment=None)


def _model_names(answer: _Answer) -> list[str]:
    try:
        return [str(model["id"]) for model in answer.json()["data"]] if answer.status_code == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


def _is_own(answer: _Answer) -> bool:
    """Return whether the server is mmvllm, which accepts fields that other servers refuse."""
    try:
        return any(model["owned_by"] == "mmvllm" for model in answer.json()["data"])
    except (ValueError, KeyError, TypeError):
        return False


def _schema_field(structured: StructuredOutputsParams, is_own: bool) -> dict[str, Any]:
    """Return OpenAI's field for a schema, or for mmvllm vLLM's field, which also has the white space pattern."""
    if is_own:
        return {"structured_outputs": {"json": structured.json, "whitespace_pattern": structured.whitespace_pattern}}
    schema = {"name": "caption", "schema": json.loads(structured.json), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _pause(number: int) -> float:
    """Return the seconds to wait after attempt `number`, with jitter, so that clients do not retry all at once."""
    return min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0**number) * random.uniform(0.5, 1.0)


def _retry_after(answer: _Answer) -> float | None:
    """Return the seconds of the header `Retry-After`, or until its date; None if it is missing or invalid."""
    text = answer.headers.get("Retry-After")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(LONGEST_RETRY_AFTER, max(0.0, seconds)) if seconds == seconds else None
