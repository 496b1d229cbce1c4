"""Sessions of visitors: each has a conversation, uploaded files, and at most one request in the engine."""

import asyncio
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmvllm.demo.conversation import (
    Options,
    TokenCounts,
    Turn,
    Uploaded,
    answer_note,
    boxes_by_file,
    media_in,
    queue_note,
    to_request,
)
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import ORPHAN_SECONDS, Uploads
from mmvllm.demo.videos import ClipOptions, ClipRules, UploadedVideo, is_video, why_no_videos
from mmvllm.media.decoding import NUM_VIDEO_WORKERS, MediaDecoder
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.processes.pool import NUM_WORKERS
from mmvllm.processors.videos.load import Load

if TYPE_CHECKING:
    from mmvllm.entrypoints.async_llm import AsyncLLM

TICK_SECONDS = 0.05  # interval of the page's updates
# Limits on all sessions and on sessions without an open tab; beyond either, the longest idle of the latter is removed.
MAX_SESSIONS, MAX_CLOSED = 1000, 100
SWEEP_SECONDS = 60.0
RELOAD_SECONDS = 30.0  # the files of a closed tab are kept this long, since the tab may only have been reloaded
TOO_MUCH = (
    "The conversation has more pictures and videos than the model takes; start a new conversation, or lower the number "
    "of pixels or frames in the settings"
)
CLOSING_SECONDS = 0.1  # interval at which open pages check whether the server is shutting down
LISTEN_SECONDS = 5.0  # time limit for a browser to begin reading the results of its session
GALLERY_SIZE = 12


class NobodyReads(Exception):
    """Raised when no browser reads the results of a session, so its files are not decoded either."""


@dataclass(slots=True)
class Session:
    """The state of one browser tab."""

    id: str
    turns: list[Turn] = field(default_factory=list)
    # The last images and videos with question and answer, newest first.
    gallery: deque[tuple[Uploaded, str]] = field(default_factory=lambda: deque(maxlen=GALLERY_SIZE))
    draft: list[Path] = field(default_factory=list)  # files of the question that is being written
    known: dict[Path, Uploaded] = field(default_factory=dict)  # files as they were last read
    counting: asyncio.Task | None = None  # counts the draft's tokens
    # Locks for images and for videos, which take longer: no session takes all threads.
    reading: tuple[asyncio.Lock, asyncio.Lock] = field(default_factory=lambda: (asyncio.Lock(), asyncio.Lock()))
    request_id: str | None = None
    last_seen: float = 0.0  # on the monotonic clock
    unread_since: float | None = None  # on that clock, while a file waits until a browser reads the results

    @property
    def files(self) -> set[Path]:
        """The files that may still be shown or asked about."""
        shown = media_in(self.turns) + [one for one, _ in self.gallery]
        return {one.path for one in shown} | {*self.draft}

    def forget_files(self) -> None:
        """Forget decoded files that can no longer be shown or asked about."""
        files = self.files
        self.known = {path: one for path, one in self.known.items() if path in files}

    def resume(self, turns: list[Turn]) -> None:
        """Replace the conversation with one that the browser has kept."""
        self.turns, self.draft = turns, []
        self.gallery.clear()
        shown: list[Uploaded] = []
        for turn in turns:
            shown += turn.media
            self.show(turn, shown)

    def show(self, turn: Turn, media: list[Uploaded]) -> None:
        """Add an answer to the gallery, with the last of the images and videos that it is about."""
        if media and turn.answer:
            self.gallery.appendleft((media[-1], f"{turn.question} {turn.answer}"))


class Sessions:
    """All sessions, by gradio's session hash; used only from gradio's event loop."""

    def __init__(
        self, engine: "AsyncLLM", uploads: Uploads, settings: DemoSettings, decoder: MediaDecoder | None = None
    ):
        self.engine, self.uploads, self.settings = engine, uploads, settings
        self.decoder = decoder or MediaDecoder(settings.policy)
        self._clips: ClipRules | None = None
        # Files that take long to decode would block the event loop's default threads. Images and videos have separate
        # threads, since videos take longer.
        self._checking_images = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="mmvllm-check")
        self._checking_videos = ThreadPoolExecutor(NUM_VIDEO_WORKERS, thread_name_prefix="mmvllm-check")
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._open_tabs: Counter[str] = Counter()
        self._sweeper: asyncio.Task | None = None
        self.forget: Callable[[str], None] = lambda session_id: None  # called with each session that is removed
        # Whether the browser reads the results of a session, and how many it has not read.
        self.is_read: Callable[[str], bool] = lambda session_id: True
        self.num_unread_updates: Callable[[str], int] = lambda session_id: 0
        self.end_responses: Callable[[str], None] = lambda session_id: None  # ends a session's responses
        self.is_closed = False  # set by another thread

    @property
    def clips(self) -> ClipRules:
        """The engine's rules for videos; raises ValueError if it takes none."""
        if self._clips is None:
            if (reason := why_no_videos(self.engine)) is not None:
                raise ValueError(reason)
            self._clips = ClipRules.of(self.engine)
        return self._clips

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The checkpoint's sampling parameters; empty if the page does not use them."""
        return self.engine.sampling_defaults if self.settings.uses_generation_config else {}

    async def closing(self) -> None:
        """Return when the page is closed or the engine is shut down."""
        while not self.is_closed and self.engine.health().status not in ("draining", "stopped"):
            await asyncio.sleep(CLOSING_SECONDS)

    def get(self, session_id: str) -> Session:
        """Return the session, creating it if necessary; raises ValueError if there are too many."""
        session = self._sessions.get(session_id) or self._begin(session_id)
        session.last_seen = time.monotonic()
        self._sessions.move_to_end(session_id)
        return session

    def _begin(self, session_id: str) -> Session:
        closed = [old for old in self._sessions.values() if self._is_closed(old)]
        if len(closed) >= MAX_CLOSED or (closed and len(self._sessions) >= MAX_SESSIONS):
            self._remove(closed[0])
        if len(self._sessions) >= MAX_SESSIONS:
            raise ValueError("Too many people have this page open; try again later")
        self._sessions[session_id] = Session(session_id)
        return self._sessions[session_id]

    def _is_closed(self, session: Session) -> bool:
        """Return whether the session has no known open tab and no request in the engine."""
        return session.id not in self._open_tabs and session.request_id is None

    async def stop(self, session: Session) -> None:
        """Abort the answer that is being generated, if there is one."""
        request_id, session.request_id = session.request_id, None
        if request_id is not None:
            await self.engine.abort(request_id)

    async def end(self, session_id: str) -> None:
        """Abort the request of a visitor who has left; remove the session after `RELOAD_SECONDS` unless a tab is open.

        A reloaded tab is a new session, which claims the files that its browser names before they are removed.
        """
        if (session := self._sessions.get(session_id)) is not None:
            await self.stop(session)
            asyncio.get_running_loop().call_later(RELOAD_SECONDS, self._remove_if_left, session)

    def _remove_if_left(self, session: Session) -> None:
        if session.id not in self._open_tabs and self._sessions.get(session.id) is session:
            self._remove(session)

    @property
    def num_open_tabs(self) -> int:
        """The number of tabs that are known to be open."""
        return self._open_tabs.total()

    @contextmanager
    def open_tab(self, session_id: str) -> Iterator[None]:
        """Keep the session while its tab is open, however long it is idle."""
        self._open_tabs[session_id] += 1
        try:
            yield
        finally:
            self._open_tabs -= Counter([session_id])  # drops counts of 0

    def sweep_regularly(self) -> None:
        """Sweep every `SWEEP_SECONDS` for as long as the event loop runs."""
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """Remove idle sessions without an open tab, for which `end` will not be called, and orphaned uploads."""
        oldest = time.monotonic() - ORPHAN_SECONDS
        for session in [*self._sessions.values()]:
            if self._is_closed(session) and session.last_seen < oldest:
                self._remove(session)
        await self.uploads.remove_orphans()

    def tidy(self, session: Session) -> None:
        """Remove files that can no longer be shown or asked about."""
        self.uploads.release(session.id, keep=session.files)
        session.forget_files()

    def drop(self, session_id: str) -> None:
        """Remove a session even while it is in use; its page has to be reloaded."""
        self.end_responses(session_id)
        if (session := self._sessions.get(session_id)) is not None:
            self._remove(session)

    def _remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self.uploads.release(session.id)
        self.forget(session.id)

    async def answer(self, session: Session, turn: Turn, options: Options) -> AsyncGenerator[None, None]:
        """Add a turn and generate its answer, yielding whenever the page has to be updated.

        Raises the errors of `AsyncLLM.generate`; the turn is then removed if it has no answer yet.
        """
        session.turns.append(turn)
        session.request_id = request_id = f"demo-{uuid.uuid4().hex}"
        try:
            async with aclosing(self._deltas(session, options)) as ticks:
                async for deltas in ticks:
                    before = turn.answer, turn.note
                    turn.answer += "".join(delta.text for delta in deltas)
                    turn.note = "" if turn.answer else queue_note(self.engine.position(request_id))
                    if deltas and (output := deltas[-1].output) is not None:
                        self._finish(session, turn, options, output)
                    if (turn.answer, turn.note) != before:
                        yield
        except Exception as error:
            turn.note = str(error)
            if not turn.answer and turn in session.turns:
                session.turns.remove(turn)
            raise
        finally:
            if session.request_id == request_id:
                session.request_id = None

    async def _deltas(self, session: Session, options: Options) -> AsyncGenerator[list[Delta], None]:
        self._check_length(session, options)
        params = options.sampling_params(self.sampling_defaults)
        has_videos = any(isinstance(one, UploadedVideo) for one in media_in(session.turns))
        request = to_request(session.turns, options, self.clips if has_videos else None)
        request["allow_special_tokens"] = self.settings.allow_special_tokens
        request["chat_template_kwargs"] = self.settings.chat_template_kwargs
        with self.decoder.session() as decode:  # cancelled when the answer is stopped or the visitor leaves
            stream = self.engine.generate(
                request,
                params,
                session.request_id,
                timeout=self.settings.timeout,
                load=Load(image=lambda image: image.load(decode), video=lambda video, plan: video.load(decode, plan)),
            )
            async with aclosing(in_ticks(stream, TICK_SECONDS)) as ticks:
                async for deltas in ticks:
                    yield deltas

    def _check_length(self, session: Session, options: Options) -> None:
        """Raise ValueError, before anything is decoded, for media that alone exceed the model's context."""
        left = self.engine.max_model_len
        for one in media_in(session.turns):  # stops early: a conversation may have hundreds
            left -= self._num_tokens(one, options)
            if left <= 0:
                raise ValueError(TOO_MUCH)

    def counts(self, media: list[Uploaded], options: Options) -> TokenCounts:
        """Return the token counts of images and videos; raises ValueError for invalid options."""
        images = [self._num_tokens(one, options) for one in media if isinstance(one, UploadedImage)]
        videos = [self._num_tokens(one, options) for one in media if isinstance(one, UploadedVideo)]
        return TokenCounts(images, videos)

    def _num_tokens(self, one: Uploaded, options: Options) -> int:
        if isinstance(one, UploadedVideo):
            return self.clips.num_tokens(one.info, options.of_clips)
        return one.num_tokens(self.engine.image_config, *options.pixel_bounds)

    async def read(self, session: Session, path: Path, options: ClipOptions) -> Uploaded:
        """Return an uploaded file, decoding it unless that was done before; raises UploadError if it cannot be used.

        An image is decoded to detect damage before the visitor asks about it. For a video, only a few of the frames
        that `options` select are decoded.
        """
        async with session.reading[is_video(path)]:
            return await self._read(session, path, options)

    async def _read(self, session: Session, path: Path, options: ClipOptions) -> Uploaded:
        known = session.known.get(path)
        if is_video(path):
            plan = self.clips.preview_plan(options)
            is_known = known is not None and known.indices == tuple(plan.frame_indices(known.info))
            threads, read = self._checking_videos, partial(UploadedVideo.read, path, plan)
        else:
            is_known = known is not None
            threads, read = self._checking_images, partial(UploadedImage.read, path)
        if not is_known:
            await self._wait_until_read(session)
            with self.decoder.session() as decode:
                known = await asyncio.get_running_loop().run_in_executor(threads, read, decode)
            session.known[path] = known
        return known

    async def _wait_until_read(self, session: Session) -> None:
        """Return once a browser reads the session's results, normally at once; raise NobodyReads if none does.

        Otherwise, files of disconnected clients would delay other visitors' files. All files and events of a session
        share the same `LISTEN_SECONDS`.
        """
        try:
            while not (self.is_read(session.id) or session.id in self._open_tabs):
                if session.unread_since is None:
                    session.unread_since = time.monotonic()
                is_over = time.monotonic() > session.unread_since + LISTEN_SECONDS
                if is_over or self._sessions.get(session.id) is not session:
                    raise NobodyReads("the page does not read its results; reload it")
                await asyncio.sleep(TICK_SECONDS)
        except asyncio.CancelledError:  # another event of the session replaces this one
            session.unread_since = None
            raise
        session.unread_since = None

    def _finish(self, session: Session, turn: Turn, options: Options, output: RequestOutput) -> None:
        if turn not in session.turns:  # it was removed in the meantime
            return
        # After a stop, the next question may have been added already.
        media = media_in(session.turns[: session.turns.index(turn) + 1])
        turn.note = answer_note(output, self.counts(media, options))
        turn.boxes = boxes_by_file(output.boxes, media)
        session.show(turn, media)


async def in_ticks(stream: AsyncGenerator[Delta, None], seconds: float) -> AsyncGenerator[list[Delta], None]:
    """Yield the deltas since the last tick, or an empty list; closing this generator closes the stream."""
    deltas: list[Delta] = []

    async def collect() -> None:
        async with aclosing(stream):
            async for delta in stream:
                deltas.append(delta)

    task = asyncio.create_task(collect())
    try:
        while deltas or not task.done():
            await asyncio.wait([task], timeout=seconds)
            new, deltas[:] = deltas[:], []
            yield new
        await task  # raises the stream's exception
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
