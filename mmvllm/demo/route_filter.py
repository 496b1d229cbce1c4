"""Forwards to gradio only requests for routes that the page uses, within size limits (pure ASGI)."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import Protocol
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.demo.assets import CompressedFiles, as_it_is, is_file
from mmvllm.demo.checks import (
    clean_headers,
    content_length,
    has_body,
    has_charset,
    is_foreign,
    is_host,
    is_logged_in,
    is_simple,
    is_unusable,
)
from mmvllm.demo.parts import FileParts
from mmvllm.demo.session import MAX_SESSIONS, Sessions
from mmvllm.demo.turns import Turns
from mmvllm.demo.uploads import Incoming
from mmvllm.utils.asgi import in_pieces
from mmvllm.utils.text import counted, parse_json

API = "/gradio_api/"
# Gradio has further routes, which would fetch URLs for clients or write files that belong to no session.
ROUTES = frozenset(
    {"app_id", "info", "login_check", "queue/data", "queue/join", "startup-events", "theme.css", "token"}
    | {"upload", "upload_progress", "user"}
)
# Routes that are open before a login; gradio itself requests "startup-events" when it launches the page.
OPEN_ROUTES = frozenset({"app_id", "login_check", "startup-events", "theme.css", "token", "user"})
# Gradio's routes that the page disables: an image in the page, or a link on another page, could log a visitor out.
ABSENT = ("/openapi.json", "/docs", "/redoc", "/logout")
HEARTBEAT = "heartbeat/"  # followed by the session's id; this request stays open as long as the page is open
FILE = "file="  # followed by the path of an uploaded file; gradio would also serve URLs and files of other folders
JOIN = "queue/join"
EVENTS = (JOIN, "run/")  # start the handler whose number is in the body
# The only query parameter that gradio gets, with its checked value: gradio would take the last of several values.
QUERIES = {"queue/data": "session_hash", "upload": "upload_id", "upload_progress": "upload_id"}
SESSION = re.compile(r"[0-9A-Za-z-]{1,64}")  # gradio's pages and clients choose letters and digits, or a UUID
MAX_BODY_BYTES = 2**20  # of a request other than an upload, and of the multipart headers of an upload
MAX_LOGIN_BYTES = 2**14  # gradio decodes a login with the sender's codec, which may take quadratic time
SMALL_BODY = 2**16  # bytes; up to this size, a body is checked without waiting for others
# Gradio's own message, on which the browser begins a new session.
UNKNOWN_SESSION = (
    'data: {"msg":"unexpected_error","message":"404: Not Found","session_not_found":true,"success":false}\n\n'
)
MAX_ENDINGS = 4  # heartbeats that may end at the same time
# Limits the bodies that arrive, and the events that have not ended; gradio's objects for them are up to five times as
# large. Small events count, but are never refused for their size: gradio takes at most 200 MB of them at a time.
MAX_EVENT_BYTES, SMALL_EVENT_BYTES = 2**26, 2**14
MAX_UNREAD = 12  # results that gradio keeps for a session until its browser reads them
UPLOAD_SECONDS, BODY_SECONDS, LOGIN_SECONDS = 300.0, 60.0, 10.0
# An upload that falls behind this rate is ended, since it holds space that others may need.
FIRST_SECONDS, MIN_BYTES_PER_SECOND = 20.0, 8 * 1024
FORGET_SECONDS = 10.0
NO_ROOM = "There is no room for more files right now; try again later"


# Set once the response with a session's results has ended; known to the tasks that gradio starts for the response.
RESPONSE_ENDED: ContextVar[asyncio.Event | None] = ContextVar("RESPONSE_ENDED", default=None)


class Results(Protocol):
    """Gradio's state of uploads and of event results, which a session's browser reads from one endless response."""

    def num_unread(self, session_id: str) -> int:
        """Return how many events have results that the browser has not read."""

    def has_results(self, session_id: str) -> bool:
        """Return whether gradio knows the session."""

    def count_event_bytes(self) -> int:
        """Return the total size of all events that have not ended."""

    def being_sent(self, session_id: str, num_bytes: int) -> AbstractContextManager[None]:
        """Count `num_bytes` of results as unread while they are sent to the session's browser."""

    def forget_upload(self, upload_id: str) -> None:
        """Forget the progress of an upload."""


class _Reader:
    """The connection of a browser that reads results; when its session is dropped, gradio sees a disconnect."""

    def __init__(self, receive: Receive, send: Send):
        self._receive, self._send = receive, send
        self._sending: asyncio.Timeout | None = None
        self.is_gone = False

    async def receive(self) -> Message:
        return {"type": "http.disconnect"} if self.is_gone else await self._receive()

    async def send(self, message: Message) -> None:
        """Send a message; `leave` cuts off a message that is being sent."""
        if self.is_gone:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as self._sending:
                await self._send(message)
        self._sending = None

    def leave(self) -> None:
        self.is_gone = True
        if self._sending is not None and not self._sending.expired():
            self._sending.reschedule(0)


class DemoRouteFilter:
    """ASGI middleware that refuses requests before they reach gradio, and tells the sessions which tabs are open.

    Args:
        events: gradio's numbers of the events that have a handler.
        results: gradio's state of the sessions' results and of uploads.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, events: Collection[int], results: Results):
        self.app, self._sessions, self._uploads = app, sessions, sessions.uploads
        self._events, self._results = events, results
        self._settings = sessions.settings
        self._endings = asyncio.Semaphore(MAX_ENDINGS)
        self._files, self._pages = CompressedFiles(), Turns()
        self._joins, self._large_joins = Turns(), Turns()  # small events never wait for large ones
        self._num_held = 0  # bytes of bodies, without uploads, that gradio has not yet queued or handled
        self._streams: defaultdict[str, set[_Reader]] = defaultdict(set)  # readers of results, by session
        sessions.is_read = lambda session_id: session_id in self._streams
        sessions.end_responses = self._end_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        send = in_pieces(send)  # a slow browser holds only one piece at a time
        if "." in scope["path"]:  # gradio compresses paths with a text suffix
            send = as_it_is(send)
        self._sessions.sweep_regularly()
        clean_headers(scope)
        route = scope["path"].partition(API)[2]
        num_bytes = content_length(scope) if scope["method"] == "POST" else 0
        if (refusal := self._refusal(scope, route, num_bytes)) is not None:
            return await refusal(scope, receive, send)
        value = _query(scope, QUERIES[route]) if route in QUERIES else ""
        is_plain = SESSION.fullmatch(value) is not None
        scope = {**scope, "query_string": f"{QUERIES[route]}={value}".encode() if is_plain else b""}
        with suppress(ClientDisconnect):  # a client that disconnects while sending is not an error
            if route == "upload":
                await self._upload(value, num_bytes, scope, receive, send)
            elif route.startswith(HEARTBEAT):
                if self._sessions.num_open_tabs >= MAX_SESSIONS:
                    return await PlainTextResponse("Too many pages are open; close some", 429)(scope, receive, send)
                with self._sessions.open_tab(route.removeprefix(HEARTBEAT)):
                    await self._until_closing(scope, receive, send)
            elif scope["method"] == "POST":
                await self._post(route, num_bytes, scope, receive, send)
            elif route == "queue/data":
                await self._unread(value, scope, receive, send)
            elif route == "upload_progress":
                await self._progress(value, scope, receive, send)
            elif not route and is_file(scope["path"]):
                await self._files.respond(self.app, scope, receive, send)
            elif not route or route == "info":
                await self._pages.respond(self.app, scope, receive, send)
            else:
                await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, route: str, num_bytes: int | None) -> PlainTextResponse | None:
        path, headers = scope["path"], Headers(scope=scope)
        if "host" in headers and not is_host(headers["host"]):
            return PlainTextResponse("The Host header must be a valid host name", 400)
        if is_foreign(scope["method"], headers, is_page=not route):
            return PlainTextResponse("Open the page itself", 403)
        if is_unusable(path) or path.rstrip("/").endswith(ABSENT) or (route and not self._is_known(route)):
            return PlainTextResponse("There is nothing here", 404)
        if route and route not in OPEN_ROUTES and not is_logged_in(scope):
            return PlainTextResponse("Log in first", 401)
        if scope["method"] == "POST" and not route and not path.rstrip("/").endswith("/login"):
            return PlainTextResponse("There is nothing here", 404)
        if scope["method"] != "POST" and has_body(headers):  # gradio would wait for it
            return PlainTextResponse("Send no body", 400)
        if num_bytes is None:  # the length is unknown until the end
            return PlainTextResponse("Send a Content-Length", 411)
        if route == "upload" and num_bytes > self._settings.max_upload_bytes + MAX_BODY_BYTES:
            return PlainTextResponse(self._too_much(), 413)
        if route != "upload" and num_bytes > (MAX_BODY_BYTES if route else MAX_LOGIN_BYTES):
            return PlainTextResponse("This is too long", 413)
        if scope["method"] == "POST" and not route and has_charset(scope):
            return PlainTextResponse("Send the login as text in UTF-8", 400)
        return None

    def _is_known(self, route: str) -> bool:
        if route.startswith(HEARTBEAT):
            return SESSION.fullmatch(route.removeprefix(HEARTBEAT)) is not None
        if not route.startswith(FILE):
            return route in ROUTES or route.startswith(EVENTS)
        try:
            self._uploads.find(route.removeprefix(FILE))
        except ValueError:
            return False
        return True

    def _too_much(self) -> str:
        settings = self._settings
        images = f"{counted(settings.max_images, 'picture')} of {settings.policy.max_bytes:,} bytes"
        videos = f"{counted(settings.max_videos, 'video')} of {settings.policy.max_video_bytes:,} bytes"
        return f"Too much for one question; at most {images} and {videos} go into it"

    async def _post(self, route: str, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            refusal = await self._read(body, route, num_bytes, Request(scope, receive))
            if refusal is None:
                return await self._handle(route, body, scope, receive, send)
        finally:
            self._num_held -= len(body)
        await refusal(scope, receive, send)

    async def _read(self, body: bytearray, route: str, num_bytes: int, request: Request) -> PlainTextResponse | None:
        """Read a body; return a refusal if it is late, or if it is large and too many bytes are already held."""
        try:
            async with asyncio.timeout(BODY_SECONDS if route else LOGIN_SECONDS):
                async for piece in request.stream():
                    body += piece
                    self._num_held += len(piece)  # received bytes: announcing a size costs a client nothing
                    if num_bytes > SMALL_EVENT_BYTES and self._num_held > MAX_EVENT_BYTES:
                        return PlainTextResponse("The page is busy; try again later", 503)
        except TimeoutError:
            return _late("The request took too long to arrive; try again")
        return None

    async def _handle(self, route: str, body: bytearray, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = [body]

        async def replay() -> Message:
            return {"type": "http.request", "body": bytes(pieces.pop())} if pieces else await receive()

        is_large = len(body) > SMALL_BODY
        async with self._large_joins.lock if is_large else nullcontext():
            refusal = self._refused_body(route, body)
        if refusal is not None:
            return await refusal(scope, receive, send)
        if route == JOIN:
            turns = self._large_joins if is_large else self._joins
            return await turns.respond(self.app, scope, replay, send)
        await self.app(scope, replay, send)  # "run/" responds when its handler has ended

    async def _unread(self, session: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the results of a session's events; for an unknown session, gradio's response would never end."""
        if not self._results.has_results(session):
            response = Response(UNKNOWN_SESSION, media_type="text/event-stream")
            return await response(scope, receive, send)
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            with self._results.being_sent(session, len(message.get("body", b""))):
                await reader.send(message)

        ended, reader = asyncio.Event(), _Reader(receive, send)
        token = RESPONSE_ENDED.set(ended)
        self._streams[session].add(reader)
        try:
            await self.app(scope, reader.receive, send_and_note)
            if reader.is_gone:
                await send({"type": "http.response.body", "body": b""})
        except Exception:  # the session was forgotten meanwhile; the browser has been told
            if not has_started:
                raise
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._streams[session].discard(reader)
            if not self._streams[session]:
                del self._streams[session]
            ended.set()
            RESPONSE_ENDED.reset(token)

    def _end_responses(self, session: str) -> None:
        for reader in self._streams.get(session, ()):
            reader.leave()

    def _refused_body(self, route: str, body: bytearray) -> PlainTextResponse | None:
        if not is_simple(body):
            return PlainTextResponse("This has too many parts, or too long a number", 413)
        if not route.startswith(EVENTS):
            return None
        try:
            event = parse_json(body.decode())
            session = event["session_hash"]
            is_known = event["fn_index"] in self._events and SESSION.fullmatch(session) is not None
            json.dumps(event, ensure_ascii=False, allow_nan=False).encode()  # gradio fails with NaN and lone surrogates
        except (ValueError, TypeError, KeyError, RecursionError):
            is_known = False
        if not is_known:
            return PlainTextResponse("There is no such event; reload the page", 400)
        return self._refused_event(session, len(body)) if route == JOIN else None

    def _refused_event(self, session: str, num_bytes: int) -> PlainTextResponse | None:
        """Return a refusal if gradio holds too many events or sessions; the first event of a session creates it."""
        if self._results.num_unread(session) >= MAX_UNREAD:
            return PlainTextResponse("Too much at once; wait for the last results, or reload the page", 429)
        if self._results.count_event_bytes() + num_bytes > MAX_EVENT_BYTES and num_bytes > SMALL_EVENT_BYTES:
            return PlainTextResponse("The page is busy; try again later", 503)
        try:
            self._sessions.get(session)
        except ValueError as error:
            return PlainTextResponse(str(error), 503)
        return None

    async def _until_closing(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End an endless response when the page closes: the server waits for all responses before it exits.

        Gradio does much work when such a response ends, so only a few may end at the same time.
        """
        is_complete, has_turn = False, False

        async def receive_in_turn() -> Message:
            nonlocal has_turn
            message = await receive()
            if message["type"] == "http.disconnect" and not has_turn:
                await self._endings.acquire()
                has_turn = True
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal is_complete
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)
            if is_complete and closing.done():  # gradio caught the cancellation, and would call the unload handler
                raise asyncio.CancelledError

        closing = asyncio.create_task(self._sessions.closing())
        responding = asyncio.create_task(self.app(scope, receive_in_turn, send_and_note))
        try:
            await asyncio.wait((responding, closing), return_when=asyncio.FIRST_COMPLETED)
            if responding.done():
                return await responding
        finally:
            responding.cancel()
            closing.cancel()
            await asyncio.gather(responding, closing, return_exceptions=True)
            if has_turn:
                self._endings.release()
        if not is_complete:
            await send({"type": "http.response.body", "body": b""})

    async def _progress(self, upload_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["query_string"]:
            return await PlainTextResponse("There is nothing here", 404)(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            self._results.forget_upload(upload_id)

    async def _upload(self, upload_id: str, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts = FileParts(Headers(scope=scope).get("content-type", ""), self._settings.max_files)
        except ValueError as error:
            return await PlainTextResponse(str(error), 400)(scope, receive, send)

        with self._uploads.incoming(num_bytes, parts) as upload:
            if await self._uploads.has_room():
                try:
                    return await self._with_timeout(upload, scope, receive, send)
                finally:  # the browser may ask for the progress a little later
                    loop = asyncio.get_running_loop()
                    loop.call_later(FORGET_SECONDS, self._results.forget_upload, upload_id)
        await PlainTextResponse(NO_ROOM, 507)(scope, receive, send)

    async def _with_timeout(self, upload: Incoming, scope: Scope, receive: Receive, send: Send) -> None:
        begin, num_received, has_started = asyncio.get_running_loop().time(), 0, False

        async def receive_files() -> Message:
            nonlocal num_received
            message = await receive()
            body = message.get("body", b"")
            before = upload.parts.num_files
            upload.parts.add(body)
            if upload.parts.num_files > before and not self._uploads.make_room():
                raise MultiPartException(NO_ROOM)
            num_received += len(body)
            if upload.reserve(num_received) and not await self._uploads.has_room():
                raise MultiPartException(NO_ROOM)
            rest = num_received / MIN_BYTES_PER_SECOND if message.get("more_body", False) else UPLOAD_SECONDS
            if not limit.expired() and not upload.gives_way:
                limit.reschedule(begin + min(FIRST_SECONDS + rest, UPLOAD_SECONDS))
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            async with asyncio.timeout(FIRST_SECONDS) as limit:
                upload.timeout = limit
                try:
                    await self.app(scope, receive_files, send_and_note)
                finally:
                    upload.timeout = None
        except TimeoutError:
            if not has_started:
                late = "The files took too long to arrive; try again"
                await _late(NO_ROOM if upload.gives_way else late)(scope, receive, send)


def _query(scope: Scope, name: str) -> str:
    """Return the first value of a query parameter, or "" if there is none."""
    return parse_qs(scope.get("query_string", b"").decode(errors="replace")).get(name, [""])[0]


def _late(message: str) -> PlainTextResponse:
    return PlainTextResponse(message, 408, {"Connection": "close"})
