"""Builds the page: its components, and the handler of each event."""

import asyncio
import html
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import gradio as gr
from gradio.routes import file_upload_statuses
from gradio.server_messages import ServerMessage

from mmvllm.demo.conversation import Turn
from mmvllm.demo.events import MAX_FILES, RELOAD
from mmvllm.demo.handlers import Handlers
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.messages import BUNDLED_NAME, BUNDLED_WARNING, spoken_model
from mmvllm.demo.route_filter import MAX_UNREAD, RESPONSE_ENDED
from mmvllm.demo.session import MAX_SESSIONS, NobodyReads, Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.unread import UnreadResults
from mmvllm.demo.uploads import Uploads, process_uploads
from mmvllm.demo.videos import SUFFIXES, ClipOptions, why_no_videos
from mmvllm.processors.videos.load import DIRECT
from mmvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmvllm.entrypoints.async_llm import AsyncLLM
    from mmvllm.media.decoding import MediaDecoder

HERE = Path(__file__).parent
EXAMPLES = {
    "scene-06.png": "Describe this image.",
    "scene-03.png": "What color is the star?",
    "scene-09.png": "How many shapes are there?",
    "scene-07.png": "What is at the right?",
}
NAME_FILES = "(box) => JSON.stringify((box?.files ?? []).map((file) => file.path))"
# Concurrent events: as many as all sessions may have together, so that no session waits for another's events.
MAX_EVENTS = MAX_UNREAD * MAX_SESSIONS
MAX_WAITING = MAX_SESSIONS // 2  # further events; gradio notifies each of them when an event begins
MOST_TOKENS = 1280  # default maximum of tokens per image


class _NothingKept(set):
    """A set that stays empty: gradio collects files in it to delete them later, but the page deletes them itself."""

    def add(self, path: str) -> None:
        pass

    def update(self, *paths: Iterable[str]) -> None:
        pass


def _keep_no_value(key: int, value: Any) -> None:
    """Replace gradio's method, which keeps the last value of each component, however large, for links to a state."""


class Page(gr.Blocks):
    """Gradio Blocks that accept only uploaded files, and keep nothing of a session that was removed.

    By itself, gradio would fetch a URL sent in place of a file. On a mounted page, it would copy any file of the
    server into the folder that it serves. It would also keep results that no browser reads.
    """

    sessions: Sessions
    handlers: Handlers

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Gradio blocks the event loop for a tenth of a second to read or write a long conversation. `_turn` admits one
        # event at a time, so other tasks run in between. One event of each session waits for it.
        self._turn = asyncio.Lock()
        self._own_turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
        self._event_bytes: dict[str, int] = {}  # by the id of an event

    def bound(self) -> None:
        """Bound what gradio keeps; call this once all components and the queue exist.

        Gradio then keeps neither the paths of all files nor the times of all events. The sizes of events are counted
        until they end. Messages for removed sessions are dropped, since they would stop gradio's queue for good. If
        unread results take too much memory, a session with many of them is dropped.
        """
        self.upload_file_set = _NothingKept()
        for block in self.blocks.values():
            block.temp_files = _NothingKept()
        queue = self._queue
        queue.ANALYTICS_MAX_EVENTS = 1
        push, send_message = queue.push, queue.send_message
        self._unread = UnreadResults(queue.pending_messages_per_session, self.sessions.drop)

        async def counted_push(body: Any, request: Any, username: str | None) -> Any:
            made = await push(body, request, username)
            if body.event_id is not None:
                self._event_bytes[body.event_id] = int(request.headers.get("content-length", 0))
            return made

        def send_if_known(event: Any, message: Any) -> None:
            if not (self.has_results(event.session_hash) and event.alive):
                return
            send_message(event, message)
            self._unread.count(event.session_hash, [getattr(message, name, None) for name in ("output", "log")])

        queue.push, queue.send_message = counted_push, send_if_known

    @property
    def is_running(self) -> bool:
        """Whether the page runs; also False in tasks of ended responses, whose heartbeats would otherwise never end."""
        ended = RESPONSE_ENDED.get()
        return self._is_running and (ended is None or not ended.is_set())

    @is_running.setter
    def is_running(self, value: bool) -> None:
        self._is_running = value

    def count_event_bytes(self) -> int:
        """Return the total size of the bodies of all events that have not ended."""
        for event_id in self._event_bytes.keys() - self._queue.event_ids_to_events.keys():
            del self._event_bytes[event_id]
        return sum(self._event_bytes.values())

    def being_sent(self, session_id: str, num_bytes: int) -> AbstractContextManager[None]:
        """Count `num_bytes` of results as unread while they are sent to the session's browser."""
        return self._unread.being_sent(session_id, num_bytes)

    def launch(self, **options: Any) -> Any:
        """Launch the page with `max_threads` concurrent events; gradio's default would be 40."""
        return super().launch(**{"max_threads": self.max_threads, **options})

    def num_unread(self, session_id: str) -> int:
        """Return how many events of a session have results that its browser has not read."""
        pending = self._queue.pending_event_ids_session.get(session_id, set())
        messages = self._queue.pending_messages_per_session.get(session_id)
        if messages is None or messages.empty():  # results of ended events were read, or lost with a connection
            pending.intersection_update(self._queue.event_ids_to_events)
        return len(pending)

    def num_unread_updates(self, session_id: str) -> int:
        """Return how many updates of a session's answers its browser has not read."""
        messages = self._queue.pending_messages_per_session.get(session_id)
        return 0 if messages is None else sum(one.msg == ServerMessage.process_generating for one in messages._queue)

    def has_results(self, session_id: str) -> bool:
        """Return whether gradio has a queue for the session's results, which the session's first event creates."""
        return session_id in self._queue.pending_messages_per_session

    def forget_upload(self, upload_id: str) -> None:
        """Remove gradio's record of an upload's progress."""
        file_upload_statuses._statuses.pop(upload_id, None)
        file_upload_statuses._signals.pop(upload_id, None)

    def forget(self, session_id: str) -> None:
        """Remove the results and the component values that gradio keeps for a session."""
        for event in self._queue.event_ids_to_events.values():
            if event.session_hash == session_id:
                event.alive = False  # its results are discarded
        self._queue.pending_event_ids_session.pop(session_id, None)
        self._queue.pending_messages_per_session.pop(session_id, None)
        self.state_holder.session_data.pop(session_id, None)
        self.state_holder.time_last_used.pop(session_id, None)

    def close(self, verbose: bool = True) -> None:
        self.sessions.is_closed = True
        super().close(verbose)

    async def process_api(self, *args: Any, event_data: gr.EventData | None = None, **kwargs: Any) -> dict[str, Any]:
        if (state := kwargs.get("state")) is not None:
            state._update_value_in_config = _keep_no_value
        if kwargs.get("iterator") is None:  # only at the first step of an answer
            if event_data is not None:
                self._check_files(event_data._data)
            # Gradio keeps the inputs even of failed events; only a known session's inputs are removed later.
            self.handlers.session_of(kwargs.get("session_hash") or "")
        try:
            return await super().process_api(*args, event_data=event_data, **kwargs)
        except NobodyReads as error:
            raise gr.Error(str(error), print_exception=False) from None

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], state: Any = None, *args: Any) -> list[Any]:
        self._check_files(inputs)
        try:
            async with self._own_turn(state), self._turn:
                return await super().preprocess_data(block_fn, inputs, state, *args)
        except (ValueError, OSError, AttributeError):  # malformed client input is not logged
            raise gr.Error(RELOAD, print_exception=False) from None

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any = None) -> list[Any]:
        async with self._own_turn(state), self._turn:
            return await super().postprocess_data(block_fn, predictions, state)

    def _own_turn(self, state: Any) -> asyncio.Lock:
        """Return the lock of the session with this state."""
        return self._own_turns.setdefault(self if state is None else state, asyncio.Lock())

    def _check_files(self, value: Any) -> None:
        try:
            for number, path in enumerate(_named_files(value)):
                if number == MAX_FILES:
                    raise ValueError(RELOAD)
                self.sessions.uploads.locate(path)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None


def _named_files(value: Any) -> Iterator[str]:
    """Yield all paths in a visitor's input, at any depth, including paths that gradio would not treat as files."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str):
                yield path
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)


def build_page(engine: "AsyncLLM", settings: DemoSettings, decoder: "MediaDecoder | None" = None) -> Page:
    """Build the page; launch or mount it with `**launch_options(page)`. By default it creates its own decoder."""
    uploads = process_uploads()
    handlers = Handlers(engine, settings, uploads, _examples(uploads), decoder)
    with Page(title="mmvllm", analytics_enabled=False, fill_width=True, fill_height=True) as page:
        gr.HTML(_heading(engine), elem_id="heading", padding=False)
        chat = _chat(handlers.examples)
        box = gr.MultimodalTextbox(
            # Suffixes name the formats whose MIME types not every system knows.
            file_types=["image", ".heic", ".heif", *SUFFIXES],
            file_count="multiple",
            placeholder=_title(engine),
            show_label=False,
            max_plain_text_length=100_000,
            elem_id="box",
            autofocus=True,
        )
        with gr.Row(elem_id="below-box"):
            cost = gr.HTML(handlers.limits, elem_id="cost", padding=False)
            photo_button = gr.Button("Camera", size="sm", variant="secondary", scale=0, min_width=88, elem_id="photo")
        files = gr.Textbox("[]", visible="hidden")
        # The button shows it on computers; phones open their camera application instead.
        camera = gr.Image(
            sources=["webcam"], type="filepath", format="png", show_label=False, height=280, elem_id="camera"
        )
        with gr.Row(elem_id="folded", equal_height=False):
            kept = gr.HTML(  # it folds itself: gradio does not load the content of a closed accordion
                "",
                html_template=_read("conversations.html"),
                js_on_load=_read("conversations.js"),
                model=spoken_model(engine.model),
                elem_id="conversations",
                elem_classes="folded",
                padding=False,
            )
            with gr.Accordion("Settings", open=False, elem_classes="folded"):
                options = _controls(engine, SamplingParams(**handlers.sessions.sampling_defaults))
            with gr.Accordion("Last answers", open=False, visible=False, elem_classes="folded") as answers:
                gallery = gr.Gallery(
                    show_label=False,
                    columns=4,
                    object_fit="contain",
                    allow_preview=False,
                    buttons=[],
                    interactive=False,
                    elem_id="gallery",
                )

        hidden = {"show_progress": "hidden", "api_visibility": "private"}
        shown = {"outputs": [chat, box, gallery, answers, kept], **hidden}
        # Gradio's preprocessing is not needed: it would only replace the names of uploaded files.
        asked = {"inputs": [box, *options], "preprocess": False, **shown}
        answered = [
            box.submit(handlers.ask, **asked),
            chat.example_select(handlers.example, **asked),
            chat.retry(handlers.retry, **asked),
            chat.edit(handlers.edit, **asked),
        ]
        chat.undo(handlers.undo, **shown)
        chat.clear(handlers.clear, **shown)
        kept.fresh(handlers.clear, **shown)
        kept.restore(handlers.restore, **shown)
        page.load(None, js="() => window.mmvllmResume()")
        photo_button.click(None, js="() => window.mmvllmTakePhoto()")
        box.stop(handlers.stop, queue=False, **hidden)
        # The server is notified when files are added or removed, but not of every keystroke.
        notify = {"fn": None, "inputs": box, "outputs": files, "js": NAME_FILES}
        box.change(**notify)
        photo = camera.input(handlers.take_photo, [camera, box], [camera, box], preprocess=False, **hidden)
        for event in (*answered, photo):
            event.then(**notify)  # gradio sends no `change` if the server changes only the files
        counted = {"fn": handlers.count, "inputs": [files, *options], "outputs": cost, **hidden}
        for trigger in (files.change, *(option.change for option in options[-3:])):
            trigger(**counted)
        page.unload(handlers.leave)
    page.handlers, page.sessions = handlers, handlers.sessions
    page.sessions.forget, page.sessions.num_unread_updates = page.forget, page.num_unread_updates
    page.state_session_capacity = MAX_SESSIONS
    page.max_threads = MAX_EVENTS
    page.queue(default_concurrency_limit=None, api_open=False, max_size=MAX_WAITING)
    page.bound()
    return page


def _title(engine: "AsyncLLM") -> str:
    return "Ask about a picture" if why_no_videos(engine) else "Ask about a picture or a video"


def _heading(engine: "AsyncLLM") -> str:
    is_bundled = engine.model == BUNDLED_NAME
    warning = f'<p id="warning" role="note">{html.escape(BUNDLED_WARNING)}</p>' if is_bundled else ""
    return f"<h1>{_title(engine)}</h1><p>{html.escape(spoken_model(engine.model))}</p>{warning}"


def _read(name: str) -> str:
    return (HERE / "static" / name).read_text(encoding="utf-8")


def _examples(uploads: Uploads) -> list[Turn]:
    """Copy the packaged examples to the folder that gradio serves, and return them as turns."""
    folder = uploads.folder / "examples"
    shutil.copytree(HERE / "examples", folder, dirs_exist_ok=True)
    paths = [folder / name for name in EXAMPLES]
    for path in paths:
        uploads.keep(path)
    images = [UploadedImage.read(path, DIRECT) for path in paths]
    return [Turn(question, (image,)) for question, image in zip(EXAMPLES.values(), images, strict=True)]


def _chat(examples: list[Turn]) -> gr.Chatbot:
    cards = [
        {"text": turn.question, "icon": str(turn.media[0].path), "files": [str(turn.media[0].path)]}
        for turn in examples
    ]
    return gr.Chatbot(
        show_label=False,
        height=None,  # it takes the height that the rest of the page leaves
        min_height=220,
        scale=1,
        editable="user",
        buttons=["copy"],
        layout="bubble",
        examples=cards,
        allow_file_downloads=False,
        latex_delimiters=[],
        allow_tags=False,
        elem_id="chat",
        group_consecutive_messages=False,
        feedback_options=None,
    )


def _controls(engine: "AsyncLLM", params: SamplingParams) -> list[gr.components.Component]:
    """Build the controls in the order of the fields of `Options`, with sampling controls set from `params`."""
    config = engine.image_config
    token = config.factor**2
    largest = min(config.max_pixels, engine.max_model_len * token) // token * token
    pixels = {"minimum": 4 * token, "maximum": largest, "step": 1, "min_width": 240}
    system = gr.Textbox("", label="System prompt", lines=2)
    with gr.Row():
        # A slider rounds to its step: 1e-6 becomes 0, which is greedy too.
        fine = {"step": 0.01, "min_width": 240}
        most = max(2.0, params.temperature)
        temperature = gr.Slider(0, most, round(params.temperature, 2), label="Temperature", **fine)
        top_p = gr.Slider(0.01, 1, max(0.01, round(params.top_p, 2)), label="Top-p", **fine)
    with gr.Row():
        top_k = gr.Number(max(0, params.top_k), label="Top-k, or 0 for all", min_width=240, precision=0)
        penalty = gr.Number(params.repetition_penalty, label="Repetition penalty", min_width=240, step=0.05)
    with gr.Row():
        max_tokens = gr.Slider(1, engine.max_model_len, 256, step=1, min_width=240, label="Longest answer, in tokens")
        seed = gr.Number(-1, label="Seed, or -1 for none", min_width=240, precision=0)
    with gr.Row():
        low = gr.Slider(value=config.min_pixels, label="Fewest pixels of a picture or frame", **pixels)
        most = min(MOST_TOKENS * token, largest)
        high = gr.Slider(value=most, label="Most pixels of a picture or frame", **pixels)
    rate = {"label": "Frames per second of a video", "visible": why_no_videos(engine) is None}
    fps = gr.Slider(0.1, 8, ClipOptions().fps, step=0.1, **rate)
    return [system, temperature, top_p, top_k, penalty, max_tokens, seed, low, high, fps]
