"""Captions from an endpoint: a captioner whose requests a server answers instead of an engine in this process."""

import base64
import io
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from mmvllm.captioning.jobs.captioner import Captioner, Select
from mmvllm.captioning.jobs.endpoint import Endpoint
from mmvllm.captioning.jobs.preparation import image_info
from mmvllm.captioning.json_captions import parsed
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.items import item_of
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.entrypoints.request_queue import Prepare, PreparedRequest
from mmvllm.entrypoints.request_stream import Followers, Key
from mmvllm.errors import RequestError
from mmvllm.outputs import RequestOutput

MAX_PIXELS = 2048 * 2048  # of an image that is sent, unless the settings have a limit
MAX_JPEG_SIDE = 65_500  # limit of libjpeg
LOSSLESS_PIXELS = 512 * 512  # images up to this size are sent as PNG, larger ones as JPEG
JPEG = {"format": "JPEG", "quality": 95, "subsampling": 0}
POLL_SECONDS = 0.05  # to wait for answers before checking for prepared images


@dataclass(frozen=True, slots=True)
class EndpointInput:
    """A conversation with the image as a data URI; `others` are the conversations with the job's further prompts."""

    messages: list[dict]
    media_info: dict[str, Any]
    num_bytes: int
    others: "tuple[EndpointInput, ...]" = ()
    num_media_tokens: int = 0  # only the server knows it


class EndpointPreparer:
    """Turns the request for an item into conversations; raises RequestError for an image that cannot be used."""

    def __init__(self, max_pixels: int | None, loader: ItemLoader):
        self._max_pixels, self._loader = max_pixels or MAX_PIXELS, loader

    def __call__(self, request: dict) -> EndpointInput:
        item = item_of(request["messages"])
        if item.is_video:
            item.read()  # raises the reason if the item cannot be read
            raise RequestError("videos are not sent to an endpoint; caption them with an engine of this machine")
        image = self._loader.image(item)
        media_info, uri = image_info(image), data_uri(image, self._max_pixels)
        first, *others = [
            EndpointInput(_with_uri(messages, uri), media_info, len(uri))
            for messages in (request["messages"], *request.get("more", ()))
        ]
        return EndpointInput(first.messages, media_info, len(uri), tuple(others))


class EndpointSource(Captioner):
    """Makes the records of pending tasks from an endpoint's answers, at most `concurrency` requests at a time."""

    noun = "the endpoint"

    def __init__(
        self,
        endpoint: Endpoint,
        settings: CaptionSettings,
        loader: ItemLoader,
        concurrency: int,
        num_workers: int | None,
        ordered: bool,
    ):
        super().__init__(None, settings, loader, num_workers, ordered=ordered)
        self._endpoint, self._concurrency = endpoint, concurrency
        self._changed = threading.Condition()
        self._followers = Followers()
        self._in_flight: set[Key] = set()  # until the answer is yielded
        self._answers: deque[tuple[Key, RequestOutput | None]] = deque()

    @property
    def max_requests(self) -> int:
        return 2 * self._concurrency

    def stop(self) -> None:
        """Drop all requests except requests in flight; may be called from a signal handler."""
        super().stop()
        self._endpoint.stop()

    def _preparer(self) -> Prepare:
        return EndpointPreparer(self.settings.max_pixels, self._loader)

    def _outputs(self, select: Select) -> Iterator[tuple[Key, RequestOutput | None]]:
        while True:
            while len(self._in_flight) < self._concurrency:
                if (follower := self._followers.take(lambda key: key not in self._in_flight)) is not None:
                    self._send(*follower)
                elif (item := self._prefetcher.get(wait=not self._in_flight)) is not None:
                    yield from self._begin(item, select)
                else:
                    break
            yield from self._take()
            if not self._in_flight and not self._followers and self._prefetcher.is_exhausted:
                return

    def _begin(self, item: PreparedRequest, select: Select) -> Iterator[tuple[Key, RequestOutput | None]]:
        key = (item.index, 0)
        try:
            prompt = item.engine_input()
        except RequestError as error:
            yield key, RequestOutput("", error=str(error), exception=error.detached())
            return
        if select(item):
            self._followers.hold(key, prompt.others)
            self._send(key, prompt)
        else:
            yield key, None

    def _send(self, key: Key, prompt: EndpointInput) -> None:
        self._in_flight.add(key)
        threading.Thread(target=self._complete, args=(key, prompt), name="mmvllm-endpoint", daemon=True).start()

    def _complete(self, key: Key, prompt: EndpointInput) -> None:
        try:
            output = self._endpoint.complete(prompt.messages, self.settings.sampling_params, **_fields(self.settings))
            if output is not None and self.settings.schema is not None and _is_other_text(output):
                error = "the endpoint's answer is not JSON: its server may not enforce schemas"
                output = replace(output, completions=[], error=error)
        except Exception as error:  # a bug: other images are not affected
            output = RequestOutput("", error=f"the request failed: {type(error).__name__}: {error}")
        with self._changed:
            self._answers.append((key, output))
            self._changed.notify_all()

    def _take(self) -> Iterator[tuple[Key, RequestOutput | None]]:
        with self._changed:
            self._changed.wait_for(lambda: self._answers, POLL_SECONDS if self._in_flight else 0)
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
        self._in_flight.difference_update(key for key, _ in answers)
        yield from answers


def _fields(settings: CaptionSettings) -> dict[str, Any]:
    """Return the fields of a request besides messages and sampling parameters."""
    return {"chat_template_kwargs": settings.chat_template_kwargs} if settings.chat_template_kwargs else {}


def _is_other_text(output: RequestOutput) -> bool:
    """Return whether any complete answer is not JSON."""
    whole = [one.text for one in output.completions if one.finish_reason == "eos"]
    return any(parsed(text) is None and text.strip() != "null" for text in whole)


def data_uri(image: Image.Image, max_pixels: int) -> str:
    """Encode an image as a data URI, shrunk to `max_pixels` and the sides of a JPEG; small images are PNGs."""
    width, height = image.size
    scale = min(math.sqrt(max_pixels / (width * height)), MAX_JPEG_SIDE / max(width, height))
    if scale < 1:
        size = max(1, int(width * scale)), max(1, int(height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
    file, is_small = io.BytesIO(), image.width * image.height <= LOSSLESS_PIXELS
    image.save(file, **({"format": "PNG"} if is_small else JPEG))
    data = base64.b64encode(file.getbuffer()).decode()
    return f"data:image/{'png' if is_small else 'jpeg'};base64,{data}"


def _with_uri(messages: list[dict], uri: str) -> list[dict]:
    *before, last = messages
    _, *texts = last["content"]
    image = {"type": "image_url", "image_url": {"url": uri}}
    return [*before, last | {"content": [image, *texts]}]
