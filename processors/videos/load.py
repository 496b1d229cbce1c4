"""Loads the frames of a video from any source, or raises VideoError with the source and the reason."""

import io
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from PIL.Image import Image

from mmvllm.errors import RequestError, VideoError, without_frames
from mmvllm.processors.budget import VIDEO_DECODING
from mmvllm.processors.download import download, without_login
from mmvllm.processors.images.decode import Reserve
from mmvllm.processors.images.load import MAX_FILE_BYTES, decode_data_uri, file_url_path, load_image, local_file
from mmvllm.processors.videos.animation import HEAD_BYTES, animation_info, decode_animation, is_animation
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.decode import decode_video, video_info
from mmvllm.processors.videos.frame_list import clip_of, given_info, is_given
from mmvllm.processors.videos.limits import ANY_VIDEO, VideoLimits
from mmvllm.processors.videos.processor import ClipPlan

T = TypeVar("T")

MAX_VIDEO_DOWNLOAD_BYTES = 1024 * 1024 * 1024
MEMORY_BYTES = 16 * 1024 * 1024  # of a download; larger downloads go to a temporary file

_SHARED = threading.Lock()  # a file object that several requests share must not be read by two threads at once


def load_video(
    source: Any, plan: ClipPlan, limits: VideoLimits = ANY_VIDEO, reserve: Reserve = VIDEO_DECODING.reserve
) -> Clip:
    """Load the frames that `plan` selects.

    Args:
        source: a path; encoded bytes or a binary file object; a file:// or http(s):// URL or a data URI; a list of
            frames, each a source of `load_image`; an array or tensor of uint8 with shape (frames, height, width, 3);
            vLLM's tuple of such frames and metadata (`fps`, `total_num_frames`, `frames_indices`, `duration`,
            `do_sample_frames`). Animated images (GIF, WebP, AVIF, PNG) and TIFF with several pages are videos, too.
        limits: limits of encoded videos.
        reserve: called before decoding with the bytes that it takes (see `load_image`).

    Raises VideoError, a ValueError that references no frames and no other exception; ImageError for a frame of a list.
    """
    try:
        if is_given(source):
            return clip_of(source, plan)
        return _read(
            source,
            lambda file, name: decode_video(file, name, plan, limits, reserve),
            lambda data, name: decode_animation(data, name, plan, limits, reserve),
        )
    except RequestError as error:
        failure = without_frames(error)
    try:
        raise failure
    finally:  # the traceback's frame must reference neither the source nor, in a cycle, the error
        del source, failure


def load_video_info(
    source: Any,
    limits: VideoLimits = ANY_VIDEO,
    reserve: Reserve = VIDEO_DECODING.reserve,
    counts: bool = False,
) -> VideoInfo:
    """Return the metadata of a video from any source of `load_video`; see `video_info` for `counts`."""
    if is_given(source):
        return given_info(source)
    return _read(
        source,
        lambda file, name: video_info(file, name, limits, reserve, counts),
        lambda data, name: animation_info(data, name, limits, reserve),
    )


def _read(source: Any, video: Callable[[Any, str], T], animation: Callable[[bytes, str], T]) -> T:
    """Call `video` with a path or a file, or `animation` with the bytes of an animated image."""
    with _opened(source) as (file, name):
        head = _bytes_of(file, HEAD_BYTES)
        if not head:
            raise VideoError(name, "is empty (0 bytes)")
        if not is_animation(head):
            return video(file, name)
        data = _bytes_of(file, MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise VideoError(name, f"has more than {MAX_FILE_BYTES} bytes")
        return animation(data, name)


def _bytes_of(file: str | BinaryIO, size: int) -> bytes:
    """Read the first bytes of a file, at most `size`."""
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return _bytes_of(opened, size)
    there = file.seek(0, os.SEEK_END)
    file.seek(0)
    return file.read(min(size, there))  # `read` allocates as much memory as it is asked for


@contextmanager
def _opened(source: Any) -> Iterator[tuple[str | BinaryIO, str]]:
    """Yield a path or a seekable file, and the video's name for messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source), f"the video of {len(source)} bytes"
    elif hasattr(source, "read") and hasattr(source, "seek"):
        with _SHARED:
            _check_file_object(source)
            yield source, "the video in the file object"
    elif (scheme := source.partition(":")[0].lower() if isinstance(source, str) else "") in ("http", "https"):
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as file:
            download(source, file, MAX_VIDEO_DOWNLOAD_BYTES, VideoError)
            yield file, f"the video at {without_login(source)}"
    elif scheme == "data":
        yield io.BytesIO(decode_data_uri(source, "video/mp4", VideoError)), "the video in the data URI"
    elif scheme == "file" or isinstance(source, os.PathLike) or (isinstance(source, str) and "://" not in source):
        path = file_url_path(source) if scheme == "file" else os.fsdecode(source)
        with local_file(path, "video", VideoError) as (path, name), _file_at(path) as file:
            yield file, name
    else:
        given = f"{without_login(source):.100}" if isinstance(source, str) else type(source).__name__
        accepted = "a path, bytes, a binary file, a file:// or http(s):// URL, a data: URI, or frames"
        raise VideoError("", f"cannot load a video from {given}; give {accepted}")


@contextmanager
def _file_at(path: str) -> Iterator[str | BinaryIO]:
    """Yield the path, which FFmpeg reads without Python, or an opened file if the path is not UTF-8."""
    with open(path, "rb") as file:
        try:
            path.encode()
        except UnicodeEncodeError:
            yield file
        else:
            yield path


def _check_file_object(file: BinaryIO) -> None:
    name = "the file object"
    try:
        file.seek(0)
        head = file.read(1)
    except (AttributeError, OSError, ValueError) as error:  # for example a closed file, or one opened for writing
        raise VideoError(name, f"cannot be read ({error})") from None
    if not isinstance(head, bytes):
        raise VideoError(name, f"gives {type(head).__name__} instead of bytes; open it in binary mode")


@dataclass(frozen=True, slots=True)
class Load:
    """The functions that load a request's media; the defaults load any source in the calling thread.

    Args:
        image: source -> RGB image; for a request with `jpeg_draft`, the second argument is a `Draft` or None.
        video: source, plan -> the frames that the plan selects.
    """

    image: Callable[..., Image] = load_image
    video: Callable[[Any, ClipPlan], Clip] = load_video


DIRECT = Load()
