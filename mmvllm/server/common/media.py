"""Fetches the images and videos of requests, and keeps those that clients have named for later requests."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

from mmvllm.media.fetching import fetch
from mmvllm.media.policy import MAX_URL_LENGTH, Kind, MediaError
from mmvllm.processors.digest import digest_of
from mmvllm.server.common.conversation import ImageReference
from mmvllm.server.common.videos import VideoReference
from mmvllm.server.errors import ApiError
from mmvllm.server.http.auth_and_limits import ByteReservation
from mmvllm.server.settings import ServerSettings

MAX_FETCHES, MAX_VIDEO_FETCHES = 16, 4
STORE_OVERHEAD = 300  # bytes per entry of the store and per frame, in addition to the data
LARGEST_STORED_SHARE = 4  # an entry may take at most 1/4 of the store: one video never evicts all others
Reference = ImageReference | VideoReference
Data = bytes | list[bytes]  # encoded; a list of frames is a video


class MediaFetcher:
    """Fetches the images and videos of one server, and stores those with a uuid."""

    def __init__(self, settings: ServerSettings):
        self._settings, self._store = settings, MediaStore(settings.max_kept_media_bytes)
        self._turns = {"image": FetchTurns(MAX_FETCHES), "video": FetchTurns(MAX_VIDEO_FETCHES)}

    async def fetch_all(
        self, media: Sequence[Reference], reservation: ByteReservation, cache_salt: str | None
    ) -> list[Data]:
        """Return the encoded images and videos, counted in `reservation`; raises ApiError if one is unavailable."""
        fetched = await _all([self._fetch_given(one, reservation) for one in media])
        return [self._kept(*both, reservation, cache_salt) for both in zip(media, fetched, strict=True)]

    async def _fetch_given(self, one: Reference, reservation: ByteReservation) -> Data | None:
        """Return the encoded image or video, or None if the request has only its uuid."""
        if one.url is None:
            return None
        if isinstance(one, VideoReference):
            return await self._fetch_video(one, reservation)
        return await self._fetch(one.url, one.param, reservation)

    def _kept(self, one: Reference, data: Data | None, reservation: ByteReservation, cache_salt: str | None) -> Data:
        """Store the data of an image or video with a uuid; without data, return the stored data."""
        if one.uuid is None:
            return data
        noun = "video" if isinstance(one, VideoReference) else "image"
        key = repr((noun, reservation.client, cache_salt, one.uuid))
        if data is not None:
            self._store.keep(key, data)
            return data
        if (kept := self._store.get(key)) is None:
            message = f"no {noun} is kept under the uuid {one.uuid!r:.100}; send the {noun} and its uuid again"
            raise ApiError(400, message, param=f"{one.path}.uuid")
        reservation.take(_size_of(kept))
        return kept

    async def _fetch_video(self, video: VideoReference, reservation: ByteReservation) -> Data:
        if video.has_frames:
            limit = self._settings.media.total_timeout
            try:
                async with asyncio.timeout(limit):
                    return [await self._fetch(frame, video.param, reservation) for frame in video.frames]
            except TimeoutError:
                message = f"the frames took longer than {limit:g} s together"
                raise ApiError(400, message, param=video.param) from None
        return await self._fetch(video.url, video.param, reservation, "video")

    async def _fetch(self, url: str, param: str, reservation: ByteReservation, kind: Kind = "image") -> bytes:
        is_inline = url[:5].lower() == "data:"  # must not queue behind fetches from a slow host
        async with nullcontext() if is_inline else self._turns[kind].turn(url, reservation):
            try:
                return await fetch(url, self._settings.media, kind, reservation.take)
            except MediaError as error:
                raise ApiError(400, error.format(self._settings.media_names), param=param) from None


async def _all(fetches: Sequence[Coroutine[Any, Any, Any]]) -> list:
    """Return the results of all fetches; the first error cancels the others."""
    tasks = [asyncio.create_task(one) for one in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class FetchTurns:
    """Limits the fetches at a time to `number`, to half of it per host, and to a quarter per request.

    Slow hosts then delay other requests less.
    """

    def __init__(self, number: int):
        self._number, self._all = number, asyncio.Semaphore(number)
        self._by_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._by_request: WeakKeyDictionary[object, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, url: str, request: object) -> AsyncIterator[None]:
        """Wait until a URL may be fetched for a request."""
        try:
            host = urlsplit(url[:MAX_URL_LENGTH]).hostname or ""
        except ValueError:  # the URL is invalid, and `fetch` refuses it
            host = ""
        of_host = self._by_host.setdefault(host, asyncio.Semaphore(self._number // 2))
        of_request = self._by_request.setdefault(request, asyncio.Semaphore(self._number // 4))
        async with of_request, of_host, self._all:
            yield


class MediaStore:
    """Keeps images and videos that clients have named in memory, so that later requests need not send them again.

    Evicts the least recently used data when the total exceeds `max_bytes`, and does not keep data larger than a quarter
    of it. Keeps a digest of each key instead of the key. Thread-safe.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Data] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: str, data: Data) -> None:
        """Keep data under the key, in place of earlier data."""
        key = _digest(key)
        with self._lock:
            if (old := self._kept.pop(key, None)) is not None:
                self._num_bytes -= _memory_of(old)
            if LARGEST_STORED_SHARE * _memory_of(data) > self._max_bytes:
                return
            self._kept[key] = data
            self._num_bytes += _memory_of(data)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _memory_of(self._kept.popitem(last=False)[1])

    def get(self, key: str) -> Data | None:
        """Return the data under the key, or None."""
        key = _digest(key)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


def _digest(key: str) -> bytes:
    return digest_of(key.encode("utf-8", "surrogatepass"))


def _memory_of(data: Data) -> int:
    return _size_of(data) + STORE_OVERHEAD * (1 if isinstance(data, bytes) else 1 + len(data))


def _size_of(data: Data) -> int:
    return len(data) if isinstance(data, bytes) else sum(map(len, data))
