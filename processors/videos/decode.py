"""Decode the requested frames of a video file with PyAV (the extra `video`), and resize each one right away.

The index of a frame denotes the time index / average rate after the first frame. The frame shown at that time is taken,
so videos with a variable frame rate are sampled evenly in time.
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

NUM_THREADS = 1  # per decoder: several videos are decoded at once, and every thread holds frames
BYTES_PER_PIXEL = 48  # for a decoder's reference frames, one frame in RGB, and one that is being resized
READ_BYTES = 1 << 18  # per read from Python's file objects
REFERRING = frozenset(  # formats of FFmpeg whose files refer to other files, streams or devices
    (
        *("hls", "dash", "concat", "imf", "sdp", "rtsp", "rtp", "sap", "webm_dash_manifest", "vobsub", "lavfi"),
        *("avisynth", "image2", "image2_alias_pix", "image2_brender_pix"),  # the last ones take a name as a pattern
    )
)
TEXT_FORMATS = ("tty", "bin", "xbin", "adf", "idf")  # FFmpeg would render their text as on a terminal

_logger = logging.getLogger(__name__)


def video_info(
    file: str | BinaryIO,
    name: str,
    limits: VideoLimits = ANY_VIDEO,
    reserve: Reserve = VIDEO_DECODING.reserve,
    counts: bool = False,
) -> VideoInfo:
    """Return the metadata of a video; raises VideoError, which calls the video `name`.

    With `counts`, frames are counted to the end of the file if their number would otherwise be inferred from times.
    """
    return _read(file, name, limits, reserve, lambda stream, info: info, counts)


def decode_video(
    file: str | BinaryIO,
    name: str,
    plan: ClipPlan,
    limits: VideoLimits = ANY_VIDEO,
    reserve: Reserve = VIDEO_DECODING.reserve,
) -> Clip:
    """Decode the frames that `plan` selects; raises VideoError, which calls the video `name`.

    Args:
        file: a path, or a seekable binary file object.
        reserve: called before decoding with the bytes that it takes (see `load_image`), first for one frame.
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
    """Read the frames that `plan` selects, in order, with `frame_at`; no other frames are kept in memory.

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
    """Resize a frame to the size of the first one, from which a few videos deviate."""
    size = Resize(info.height, info.width)
    return frame if frame.shape[:2] == size[:2] else resize_frame(frame, [size])


def guarded(name: str, read: Callable[[], T]) -> T:
    """Call `read`; exceptions other than RequestError become VideoError, which references no frames."""
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
    raise VideoError(name, reason)  # raised here, after the exception above and its frames are gone


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
        # The mode is explicit; otherwise, PyAV would use the mode of a file object.
        opened = av.open(source, "r", options=_options(limits), buffer_size=READ_BYTES, metadata_errors="replace")
        if opened.format.name not in TEXT_FORMATS:
            return opened
        opened.close()
    except (av.error.InvalidDataError, av.error.ArgumentError, av.error.EOFError):
        pass  # the error below must not reference PyAV's
    known = f"in {', '.join(limits.containers)}" if limits.containers else "that FFmpeg can read"
    raise VideoError(name, f"is not a video {known}, or damaged")


def _options(limits: VideoLimits) -> dict[str, str]:
    """Return FFmpeg options that refuse playlists, and network access for other references in a file.

    Chapters are not read: a file of 180 kB may have gigabytes of them.
    """
    always = {"protocol_whitelist": "file", "ignore_chapters": "1"}
    allowed = {"format_whitelist": limits.containers or _self_contained(), "codec_whitelist": limits.codecs}
    return always | {name: ",".join(values) for name, values in allowed.items() if values}


@cache
def _self_contained() -> tuple[str, ...]:
    """Return all formats except `REFERRING`."""
    import av

    return tuple(sorted(av.formats_available - REFERRING))


def _info(stream: VideoStream, name: str, limits: VideoLimits, reserve: Reserve, counts: bool) -> VideoInfo:
    """Check and return the metadata of a stream, and go to its first frame."""
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
