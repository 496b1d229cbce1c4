"""Handlers of the page's events.

Every handler that changes the conversation returns a `View`, the new content of the page. It is built from the server's
state only; from the page, only texts, numbers and names of uploaded files are used.
"""

import asyncio
import html
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from mmvllm.decoding import MediaDecoder
from mmvllm.demo.conversation import Options, Turn, image_note, images_in, to_chat, turn_at
from mmvllm.demo.events import read_draft, read_files, read_index, read_kept, read_paths, read_text
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.record import KeptTurn, read_turns, to_record
from mmvllm.demo.session import Session, Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.demo.words import BUNDLED_NAME, NEEDS_IMAGE, SMALL_COPIES, spoken, warn
from mmvllm.errors import DeadlineExceeded, EngineUnavailable, RequestFailed

if TYPE_CHECKING:
    from mmvllm.async_llm import AsyncLLM

DEFAULT_QUESTION = "Describe this image."

KEEP_SECONDS = 1.0  # interval at which the browser is given an answer that is still being written

View = tuple[Any, Any, Any, Any, Any]  # messages, message box, gallery, the accordion around it, and the record
UNCHANGED = gr.skip()
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
        """Remove a turn and the ones after it, and put its question back into the message box."""
        session = self._session(request)
        try:
            turn = await self._take_back(session, read_index(event))
            return self._view(session, _back_in_box(session, turn))
        except ValueError as error:
            warn(error)
            return self._view(session, WAITING_BOX)

    async def clear(self, request: gr.Request) -> View:
        session = self._session(request)
        await self.sessions.stop(session)
        session.turns.clear()
        self.sessions.tidy(session)
        return self._view(session, WAITING_BOX)

    async def restore(self, request: gr.Request, event: gr.EventData) -> View:
        """Replace the conversation by one that the browser has kept, or ask the browser for images that are gone."""
        session = self._session(request)
        await self.sessions.stop(session)
        try:
            value, is_final, has_copies = read_kept(event)
            kept = read_turns(value, self.settings.max_images)
        except ValueError as error:
            warn(error)
            return self._view(session, UNCHANGED)
        claimed = self._claim_kept(session, kept)
        found = await asyncio.to_thread(self._read_kept, claimed)
        if not is_final and (missing := [path for turn in kept for path in turn.images if path not in found]):
            return UNCHANGED, UNCHANGED, UNCHANGED, UNCHANGED, to_record([], missing)
        session.resume([turn.found(found.get) for turn in kept])
        self.sessions.tidy(session)
        if has_copies:
            gr.Info(SMALL_COPIES)
        return self._view(session, WAITING_BOX)

    def _claim_kept(self, session: Session, kept: list[KeptTurn]) -> dict[str, Path]:
        """The images of kept turns that are still here, which the session claims."""
        claimed = {}
        for path in {path for turn in kept for path in turn.images}:
            with suppress(ValueError):
                claimed[path] = self.uploads.claim(session.id, path)
        return claimed

    def _read_kept(self, claimed: dict[str, Path]) -> dict[str, UploadedImage]:
        found = {}
        for path, file in claimed.items():
            with suppress(ValueError):
                found[path] = UploadedImage.read(file, self.settings.policy)
        return found

    async def stop(self, request: gr.Request) -> None:
        await self.sessions.stop(self._session(request))

    async def leave(self, request: gr.Request) -> None:
        await self.sessions.end(request.session_hash)

    async def take_photo(self, request: gr.Request, photo: dict | None, draft: dict) -> tuple[Any, Any]:
        """Add a photo to the images of the current question."""
        if photo is None:
            return UNCHANGED, UNCHANGED
        try:
            text, paths = read_draft(draft)
            paths += read_files([photo])
            session = self._session(request)  # gradio would copy other files into the folder that it serves
            session.draft = [self.uploads.claim(session.id, path) for path in paths]
        except ValueError as error:
            warn(error)
            return UNCHANGED, UNCHANGED
        return None, gr.update(value={"text": text, "files": paths})

    async def count(self, request: gr.Request, paths: str, *values: Any) -> AsyncGenerator[str, None]:
        """The number of tokens of the current question's images, or the error in them; then a damaged one, if any."""
        options, session = Options(*values), self._session(request)
        try:
            images = await self._claimed(session, read_paths(paths))
            tokens = [p.num_tokens(self.engine.image_config, options.min_pixels, options.max_pixels) for p in images]
            yield image_note(tokens) if tokens else self.limits
            await self.sessions.check(session, images)
        except ValueError as error:
            yield f'<span class="bad" role="alert">{html.escape(spoken(error))}</span>'

    @property
    def limits(self) -> str:
        size = self.settings.policy.max_bytes / 2**20
        each = f"{size:.3g} MiB" if size >= 1 else f"{size * 1024:.0f} KiB"
        megapixels = self.settings.policy.max_pixels / 1e6
        return f"Up to {self.settings.max_images} pictures of {each} and {megapixels:.3g} million pixels"

    def _session(self, request: gr.Request) -> Session:
        return self.sessions.get(request.session_hash)

    def _asking(
        self, find: Callable[[Session, Any, dict], Awaitable[Turn]]
    ) -> Callable[..., AsyncGenerator[View, None]]:
        """A handler that asks the question that `find` derives from an event and the message box."""

        async def handler(request: gr.Request, event: gr.EventData, draft: dict, *values: Any):
            session = self._session(request)
            try:
                turn = await find(session, event, draft)
            except ValueError as error:
                warn(error)
                yield self._view(session, UNCHANGED)
                return
            async with aclosing(self._answer(session, turn, Options(*values))) as views:
                async for view in views:
                    yield view

        return handler

    async def _typed(self, session: Session, event: gr.EventData, draft: dict) -> Turn:
        text, paths = read_draft(draft)
        images = await self._claimed(session, paths)
        question = text.strip()
        if not question and not images:
            raise ValueError("Add a picture, or write a question")
        if self.engine.model == BUNDLED_NAME and not images and not images_in(session.turns):
            raise ValueError(NEEDS_IMAGE)
        return Turn(question or DEFAULT_QUESTION, tuple(images))

    async def _chosen(self, session: Session, event: gr.EventData, draft: dict) -> Turn:
        index = read_index(event)
        if not 0 <= index < len(self.examples):
            raise ValueError("there is no such example")
        example = self.examples[index]
        return Turn(example.question, example.images)

    async def _same(self, session: Session, event: gr.EventData, draft: dict) -> Turn:
        old = await self._take_back(session, read_index(event))
        return Turn(old.question, old.images)

    async def _edited(self, session: Session, event: gr.EventData, draft: dict) -> Turn:
        question = read_text(event)
        old = await self._take_back(session, read_index(event))
        return Turn(question, old.images)

    async def _claimed(self, session: Session, paths: list[str]) -> list[UploadedImage]:
        """The images of the current question, which are claimed for the session."""
        session.draft = [self.uploads.claim(session.id, path) for path in paths]
        if len(paths) > self.settings.max_images:
            raise ValueError(f"{len(paths)} pictures; at most {self.settings.max_images} go into one question")
        return await asyncio.to_thread(
            lambda: [UploadedImage.read(path, self.settings.policy) for path in session.draft]
        )

    async def _take_back(self, session: Session, message: int) -> Turn:
        """Remove all turns from that of a chat message on and return it; raises ValueError if there is none."""
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
            async with aclosing(self.sessions.answer(session, turn, options)) as ticks:
                kept_at = 0.0
                async for _ in ticks:
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
        gallery = [(str(image.path), caption) for image, caption in session.gallery]
        record = to_record(session.turns)
        return to_chat(session.turns), box, gallery, gr.update(visible=bool(gallery)), record


def _back_in_box(session: Session, turn: Turn) -> dict:
    """Put a question back into the message box; its images are kept as the draft's."""
    session.draft = [image.path for image in turn.images]
    files = [str(path) for path in session.draft]
    return gr.update(value={"text": turn.question, "files": files}, submit_btn=True, stop_btn=False)
