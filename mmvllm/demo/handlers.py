"""Handlers of the page's events.

Every handler that changes the conversation returns a `View`, the new content of the page. Views are built from the
server's state. Handlers use only texts, numbers and names of uploaded files from the page.
"""

import asyncio
import html
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from mmvllm.demo.conversation import Options, Turn, Uploaded, media_in, to_chat, turn_at
from mmvllm.demo.events import read_draft, read_files, read_index, read_kept, read_paths, read_text
from mmvllm.demo.messages import BUNDLED_NAME, NEEDS_IMAGE, NO_COPIES, SMALL_COPIES, spoken, warn
from mmvllm.demo.record import KeptTurn, check_length, read_turns, to_record
from mmvllm.demo.session import Session, Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.demo.videos import ClipOptions, UploadedVideo, estimate, is_video, why_no_videos
from mmvllm.errors import DeadlineExceeded, EngineUnavailable, RequestFailed
from mmvllm.media.decoding import MediaDecoder
from mmvllm.utils.text import counted

if TYPE_CHECKING:
    from mmvllm.entrypoints.async_llm import AsyncLLM

DEFAULT_QUESTION, VIDEO_QUESTION = "Describe this image.", "Describe this video."

KEEP_SECONDS = 1.0  # interval at which the browser gets the record of an unfinished answer

MAX_UNREAD_UPDATES = 2

View = tuple[Any, Any, Any, Any, Any]  # messages, message box, gallery, the accordion around it, and the record
UNCHANGED = gr.skip()
NOTHING_NEW: View = (UNCHANGED,) * 5
WAITING_BOX = gr.update(submit_btn=True, stop_btn=False)


class Handlers:
    """The page's event handlers; `examples` are the turns offered as examples."""

    def __init__(
        self,
        engine: "AsyncLLM",
        settings: DemoSettings,
        uploads: Uploads,
        examples: list[Turn],
        decoder: MediaDecoder | None = None,
    ):
        self.engine, self.settings, self.examples = engine, settings, examples
        self.uploads, self.sessions = uploads, Sessions(engine, uploads, settings, decoder)
        self.ask, self.example = self._asking(self._typed), self._asking(self._chosen)
        self.retry, self.edit = self._asking(self._same), self._asking(self._edited)

    async def undo(self, request: gr.Request, event: gr.EventData) -> View:
        """Remove a turn and all later turns, and put its question back into the message box."""
        session = self._session(request)
        try:
            turn = await self._take_back(session, read_index(event))
            return self._view(session, _back_in_box(session, turn))
        except ValueError as error:
            warn(error)
            return UNCHANGED, WAITING_BOX, UNCHANGED, UNCHANGED, UNCHANGED

    async def clear(self, request: gr.Request) -> View:
        session = self._session(request)
        await self.sessions.stop(session)
        session.turns.clear()
        self.sessions.tidy(session)
        return self._view(session, WAITING_BOX)

    async def restore(self, request: gr.Request, event: gr.EventData) -> View:
        """Replace the conversation with one that the browser has kept, or ask the browser for missing files."""
        await self.sessions.stop(self._session(request))
        session = self._session(request)  # again: a session removed meanwhile would never release its files
        try:
            given = read_kept(event)
            kept = read_turns(given.turns, self.settings.max_files)
        except ValueError as error:
            warn(error)
            return NOTHING_NEW
        claimed = self._claim_kept(session, kept)
        found = await self._read_kept(session, claimed)
        if not given.is_final and (missing := [path for turn in kept for path in turn.media if path not in found]):
            return UNCHANGED, UNCHANGED, UNCHANGED, UNCHANGED, to_record([], missing)
        session.resume([turn.found(found.get) for turn in kept])
        self.sessions.tidy(session)
        for has_one, message in ((given.has_copies, SMALL_COPIES), (given.has_lost, NO_COPIES)):
            if has_one:
                gr.Info(message)
        return self._view(session, WAITING_BOX)

    def _claim_kept(self, session: Session, kept: list[KeptTurn]) -> dict[str, Path]:
        """Claim the files of kept turns that still exist for the session; return them by path."""
        claimed = {}
        for path in {path for turn in kept for path in turn.media}:
            with suppress(ValueError):
                claimed[path] = self.uploads.claim(session.id, path)
        return claimed

    async def _read_kept(self, session: Session, claimed: dict[str, Path]) -> dict[str, Uploaded]:
        found = {}
        for path, file in claimed.items():
            with suppress(ValueError):
                found[path] = await self.sessions.read(session, file, ClipOptions())
        return found

    async def stop(self, request: gr.Request) -> None:
        await self.sessions.stop(self._session(request))

    async def leave(self, request: gr.Request) -> None:
        await self.sessions.end(request.session_hash)

    async def take_photo(self, request: gr.Request, photo: dict | None, draft: dict) -> tuple[Any, Any]:
        """Add a photo to the files of the current question."""
        if photo is None:
            return UNCHANGED, UNCHANGED
        try:
            text, paths = read_draft(draft)
            paths += read_files([photo])
            session = self._session(request)  # `claim` refuses other files: gradio would copy and serve them
            session.draft = [self.uploads.claim(session.id, path) for path in paths]
        except ValueError as error:
            warn(error)
            return UNCHANGED, UNCHANGED
        return None, gr.update(value={"text": text, "files": paths})

    async def count(self, request: gr.Request, paths: str, *values: Any) -> Any:
        """Return how many tokens the current question's files take, or the error in them.

        Events of several controls may overlap: each cancels the previous one.
        """
        session = self._session(request)
        older, session.counting = session.counting, asyncio.create_task(self._cost(session, paths, Options(*values)))
        own = session.counting
        if older is not None:
            older.cancel()
        try:
            return await own
        except asyncio.CancelledError:
            if session.counting is own:
                raise
            return UNCHANGED

    async def _cost(self, session: Session, paths: str, options: Options) -> str:
        try:
            media = await self._read_draft(session, read_paths(paths), options)
            return self._estimate(media, options) if media else self.limits
        except ValueError as error:
            return f'<span class="bad" role="alert">{html.escape(spoken(error))}</span>'
        finally:
            session.forget_files()

    def _estimate(self, media: list[Uploaded], options: Options) -> str:
        videos = [one for one in media if isinstance(one, UploadedVideo)]
        taken = [(video, self.sessions.clips.num_frames(video.info, options.of_clips)) for video in videos]
        for video, num_frames in taken:
            video.check_pixels(num_frames, self.settings.policy)
        return estimate(taken, self.sessions.counts(media, options).note)

    @property
    def limits(self) -> str:
        policy, settings = self.settings.policy, self.settings
        images = f"{counted(settings.max_images, 'picture')} of {_size(policy.max_bytes)}"
        limits = f"Up to {images} and {policy.max_pixels / 1e6:.3g} million pixels"
        if why_no_videos(self.engine) is not None:
            return limits
        videos = f"{counted(settings.max_videos, 'video')} of {_size(policy.max_video_bytes)}"
        return f"{limits}, and {videos} and {policy.max_video_seconds / 60:.3g} minutes"

    def _session(self, request: gr.Request) -> Session:
        return self.session_of(request.session_hash)

    def session_of(self, session_id: str) -> Session:
        """Return the session, creating it if necessary; raises gr.Error if there are too many."""
        try:
            return self.sessions.get(session_id)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None

    def _asking(
        self, find: Callable[[Session, Any, dict, Options], Awaitable[Turn]]
    ) -> Callable[..., AsyncGenerator[View, None]]:
        """Create a handler that asks the question which `find` derives from an event and the message box."""

        async def handler(request: gr.Request, event: gr.EventData, draft: dict, *values: Any):
            session = self._session(request)
            try:
                turn = await find(session, event, draft, Options(*values))
            except ValueError as error:
                warn(error)
                yield NOTHING_NEW
                return
            async with aclosing(self._answer(session, turn, Options(*values))) as views:
                async for view in views:
                    yield view

        return handler

    async def _typed(self, session: Session, event: gr.EventData, draft: dict, options: Options) -> Turn:
        text, paths = read_draft(draft)
        media = await self._read_draft(session, paths, options)
        question = text.strip()
        if not question and not media:
            raise ValueError("Add a picture or a video, or write a question")
        if self.engine.model == BUNDLED_NAME and not media and not media_in(session.turns):
            raise ValueError(NEEDS_IMAGE)
        default = VIDEO_QUESTION if media and isinstance(media[-1], UploadedVideo) else DEFAULT_QUESTION
        return Turn(question or default, tuple(media))

    async def _chosen(self, session: Session, event: gr.EventData, draft: dict, options: Options) -> Turn:
        index = read_index(event)
        if not 0 <= index < len(self.examples):
            raise ValueError("there is no such example")
        example = self.examples[index]
        return Turn(example.question, example.media)

    async def _same(self, session: Session, event: gr.EventData, draft: dict, options: Options) -> Turn:
        old = await self._take_back(session, read_index(event))
        return Turn(old.question, old.media)

    async def _edited(self, session: Session, event: gr.EventData, draft: dict, options: Options) -> Turn:
        question = read_text(event)
        old = await self._take_back(session, read_index(event))
        return Turn(question, old.media)

    async def _read_draft(self, session: Session, paths: list[str], options: Options) -> list[Uploaded]:
        """Claim the files of the current question for the session and read them."""
        self._check_number(paths)
        files = session.draft = [self.uploads.claim(session.id, path) for path in paths]
        return [await self.sessions.read(session, file, options.of_clips) for file in files]

    def _check_number(self, paths: list[str]) -> None:
        """Raise ValueError if there are too many images or videos for one question."""
        num_videos = sum(is_video(Path(path)) for path in paths)
        for number, limit, noun in (
            (len(paths) - num_videos, self.settings.max_images, "picture"),
            (num_videos, self.settings.max_videos, "video"),
        ):
            if number > limit:
                raise ValueError(f"{counted(number, noun)}; at most {limit} go into one question")

    async def _take_back(self, session: Session, message: int) -> Turn:
        """Remove a chat message's turn and all later turns; return it, or raise ValueError if it does not exist."""
        await self.sessions.stop(session)
        index = turn_at(session.turns, message)
        turn = session.turns[index]
        del session.turns[index:]
        return turn

    async def _answer(self, session: Session, turn: Turn, options: Options) -> AsyncGenerator[View, None]:
        """Ask the session's next question, and stream the answer."""
        if session.request_id is not None:
            warn(ValueError("The last answer is still being written; stop it first"))
            return
        box = gr.update(value={"text": "", "files": []}, submit_btn=False, stop_btn=True)
        try:
            check_length([*session.turns, turn])
            async with aclosing(self.sessions.answer(session, turn, options)) as ticks:
                kept_at = 0.0
                async for _ in ticks:
                    if self.sessions.num_unread_updates(session.id) >= MAX_UNREAD_UPDATES:
                        continue  # gradio would keep every update; a later one has the whole answer
                    is_due = time.monotonic() >= kept_at + KEEP_SECONDS
                    record = to_record(session.turns) if is_due else UNCHANGED
                    kept_at = time.monotonic() if is_due else kept_at
                    yield to_chat(session.turns), box, UNCHANGED, UNCHANGED, record
                    box = UNCHANGED
            box = WAITING_BOX
        except (ValueError, EngineUnavailable, RequestFailed, DeadlineExceeded, MemoryError) as error:
            warn(error)
            box = WAITING_BOX if turn.answer else _back_in_box(session, turn)
        if session.request_id is None:  # otherwise a later question updates the page
            self.sessions.tidy(session)
            yield self._view(session, box)

    def _view(self, session: Session, box: Any) -> View:
        # `Path` objects: gradio embeds the content of a file whose path is a string that ends with .svg.
        gallery = [(one.path, caption) for one, caption in session.gallery]
        record = to_record(session.turns)
        return to_chat(session.turns), box, gallery, gr.update(visible=bool(gallery)), record


def _back_in_box(session: Session, turn: Turn) -> dict:
    """Return an update that puts a question back into the message box; its files become the draft's files."""
    session.draft = [one.path for one in turn.media]
    files = [str(path) for path in session.draft]
    return gr.update(value={"text": turn.question, "files": files}, submit_btn=True, stop_btn=False)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1024:.0f} KiB"
