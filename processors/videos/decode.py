"""Frames of a video file by PyAV (the extra `video`): those that are asked for, each resized as soon as it is decoded.

The index of a frame means a time, index / average rate from the first frame on; what is shown at that time is
taken, so that videos with a variable frame rate are sampled evenly in time.
"""

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import Any, BinaryIO, TypeVar

import numpy as np

from mmvllm.errors import RequestError, VideoError
from mmvllm.processors.budget import VIDEO_DECODING
from mmvllm.processors.images.decode import Reserve
from mmvllm.processors.images.scan import RefusedImage
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.limits import ANY_VIDEO, VideoLimits
from mmvllm.processors.videos.processor import ClipPlan, Resize, resize_frame, resized_to
from mmvllm.processors.videos.scan import scan_boxes
from mmvllm.processors.videos.stream import FramesEnded, VideoStream

T = TypeVar("T")

NUM_THREADS = 1  # of a decoder: several videos are decoded at once, and every thread holds frames
BYTES_PER_PIXEL = 48  # of a frame: those that a decoder keeps for reference, one in RGB, one that is being resized
READ_BYTES = 1 << 18  # at once from Python's file objects
REFERRING = frozenset(  # formats of FFmpeg whose files name other files, streams or devices
    (
        *("hls", "dash", "concat", "imf", "sdp", "rtsp", "rtp", "sap", "webm_dash_manifest", "vobsub", "lavfi"),
        *("avisynth", "image2", "image2_alias_pix", "image2_brender_pix"),  # the last ones take a name as a pattern
    )
)
TEXT_FORMATS = ("tty", "bin", "xbin", "adf", "idf")  # whose text FFmpeg would show as on a terminal

_logger = logging.getLogger(__name__)


def video_info(
    file: str | BinaryIO,
    name: str,
    limits: VideoLimits = ANY_VIDEO,
    reserve: Reserve = VIDEO_DECODING.reserve,
    counts: bool = False,
) -> VideoInfo:
    """What is known before frames are taken; raises VideoError, which calls the video `name`.

    `counts` reads the file to its end where only the time of the last frame tells how many there are.
    """
    return _read(file, name, limits, reserve, lambda stream, info: info, counts)


def decode_video(
    file: str | BinaryIO,
    name: str,
    plan: ClipPlan,
    limits: VideoLimits = ANY_VIDEO,
    reserve: Reserve = VIDEO_DECODING.reserve,
) -> Clip:
    """The frames that `plan` takes; raises VideoError, which calls the video `name`.

    Args:
        file: a path, or a binary file object that can seek.
        reserve: called with the bytes that decoding takes, before it begins (see `load_image`): first for one frame.
    """

    def take(stream: VideoStream, info: VideoInfo) -> Clip:
        def frame_at(index: int) -> np.ndarray:
            return stream.shown(index / info.fps, 1 / info.fps)

        is_logged = not (plan.is_preview or limits.containers)  # a client could fill the log of a server
        if is_logged and stream.declared_seconds > 1.1 * info.duration + 1:
            _warn_of_missing_frames(name, stream.declared_seconds, info)
        try:
            return sampled(name, info, frame_at, plan, limits, reserve)
        except FramesEnded as ended:
            intact = replace(info, total_num_frames=round(ended.seconds * info.fps) + 1)
        if is_logged:
            _warn_of_missing_frames(name, info.duration, intact)
        stream.begin()
        return sampled(name, intact, frame_at, plan, limits, reserve)

    return _read(file, name, limits, reserve, take)


def sampled(
    name: str,
    info: VideoInfo,
    frame_at: Callable[[int], np.ndarray],
    plan: ClipPlan,
    limits: VideoLimits,
    reserve: Reserve,
) -> Clip:
    """The frames that `plan` takes, given how one is read at an index, in order; no others are in memory.

    Raises VideoError for more pixels than the limits allow, RequestError as the plan does.
    """
    indices = plan.frame_indices(info)
    limits.check_frames(name, info, len(indices))
    sizes = plan.sizes(len(indices), info.height, info.width)
    height, width = resized_to(sizes, info.height, info.width)
    num_bytes = len(indices) * height * width * 3 + info.height * info.width * BYTES_PER_PIXEL
    with reserve(num_bytes):
        frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
        for at, index in enumerate(indices):
            if at and index == indices[at - 1]:
                frames[at] = frames[at - 1]
            else:
                frames[at] = resize_frame(fitted(frame_at(index), info), sizes)
    return Clip(frames, info, tuple(indices))


def fitted(frame: np.ndarray, info: VideoInfo) -> np.ndarray:
    """A frame in the size of the first one, from which a few videos deviate."""
    size = Resize(info.height, info.width)
    return frame if frame.shape[:2] == size[:2] else resize_frame(frame, [size])


def guarded(name: str, read: Callable[[], T]) -> T:
    """What `read` returns; other exceptions than RequestError become VideoError, which holds no frames."""
    try:
        return read()
    except RequestError:
        raise
    except RefusedImage as error:
        reason = str(error)
    except MemoryError:
        reason = "not enough memory to decode it; shrink it first"
    except Exception as error:  # decoders raise any exception for a damaged file
        reason = f"cannot be decoded, damaged or truncated ({getattr(error, 'strerror', None) or error})"
    raise VideoError(name, reason)  # here, where the exception above and the frames that it holds are gone


def _read(
    file: str | BinaryIO,
    name: str,
    limits: VideoLimits,
    reserve: Reserve,
    use: Callable[[VideoStream, VideoInfo], T],
    counts: bool = False,
) -> T:
    def read() -> T:
        scan_boxes(file, name)
        open_container = partial(_open, file, name, limits)
        with closing(VideoStream(open_container, name, limits, NUM_THREADS)) as stream:
            return use(stream, _info(stream, name, limits, reserve, counts))

    return guarded(name, read)


def _open(file: str | BinaryIO, name: str, limits: VideoLimits) -> Any:
    try:
        import av
    except ImportError:
        raise VideoError(name, "is a video, and PyAV is not installed; pip install 'mmvllm[video]'") from None
    if not isinstance(file, str):
        file.seek(0)
    source = f"file:{file}" if isinstance(file, str) else file  # else a colon in the path would end a protocol
    try:
        # The mode is given, else that of a file object would be taken.
        opened = av.open(source, "r", options=_options(limits), buffer_size=READ_BYTES, metadata_errors="replace")
        if opened.format.name not in TEXT_FORMATS:
            return opened
        opened.close()
    except (av.error.InvalidDataError, av.error.ArgumentError, av.error.EOFError):
        pass  # the error below refers to none of PyAV's
    known = f"in {', '.join(limits.containers)}" if limits.containers else "that FFmpeg can read"
    raise VideoError(name, f"is not a video {known}, or damaged")


def _options(limits: VideoLimits) -> dict[str, str]:
    """For FFmpeg: no playlist is opened, and whatever else a file refers to is not fetched over a network.

    Chapters are not read: a file of 180 kB may have gigabytes of them.
    """
    always = {"protocol_whitelist": "file", "ignore_chapters": "1"}
    allowed = {"format_whitelist": limits.containers or _self_contained(), "codec_whitelist": limits.codecs}
    return always | {name: ",".join(values) for name, values in allowed.items() if values}


@cache
def _self_contained() -> tuple[str, ...]:
    """All other formats."""
    import av

    return tuple(sorted(av.formats_available - REFERRING))


def _info(stream: VideoStream, name: str, limits: VideoLimits, reserve: Reserve, counts: bool) -> VideoInfo:
    """Also goes to the first frame."""
    limits.check_seconds(name, stream.declared_seconds)
    height, width = stream.declared_size
    limits.check_size(name, height, width)
    number, fps = stream.measure(counts)
    with reserve(height * width * BYTES_PER_PIXEL):
        size = stream.begin()
    if size is None:
        raise VideoError(name, "has no frame that can be decoded")
    info = VideoInfo(max(number, 1), fps, *size)
    limits.check(name, info)
    return info


def _warn_of_missing_frames(name: str, declared: float, there: VideoInfo) -> None:
    _logger.warning("%s: declares %.1f s, but only %.1f s are there", name, declared, there.duration)
