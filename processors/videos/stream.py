"""Read the frames of a video stream with PyAV: upright, in presentation order, and seeking to keyframes.

Packets that FFmpeg cannot decode are skipped; too many consecutive errors end the stream. This module bounds neither
time nor memory, but reads frames one by one.
"""

import errno
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mmvllm.errors import VideoError
from mmvllm.processors.videos.clip import MAX_FPS, is_later_shown
from mmvllm.processors.videos.limits import VideoLimits

SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi")  # formats with reliable times and keyframes
MAX_ERRORS = 64  # consecutive errors of the container
MAX_DECODER_ERRORS = 1000  # consecutive; more than the packets before the first keyframe of a cut recording
MAX_RETREATS = 3  # to earlier keyframes, before a video is read without seeking
LOST_PERIODS = 2  # after the last frame; packets within them may be second fields, or belong to no frame

Matrix = tuple[int, int, int, int]  # (a, b, c, d): a pixel at (x, y) is shown at (a * x + c * y, b * x + d * y)


class FramesEnded(Exception):
    """No frame can be decoded after the one that begins `seconds` after the first."""

    def __init__(self, seconds: float):
        super().__init__(f"no frame after {seconds:.1f} s")
        self.seconds = seconds


class VideoStream:
    """The first video stream of a file that is not a cover image; `close` closes the file.

    Args:
        open_container: opens the file with PyAV, from its beginning; called again for formats that cannot go back.
        limits: which codecs and sizes of frames are accepted.
        num_threads: number of the decoder's threads.

    Raises VideoError for a file without a video that can be decoded.
    """

    def __init__(self, open_container: Callable[[], Any], name: str, limits: VideoLimits, num_threads: int):
        self._open_container, self._name, self._limits = open_container, name, limits
        self._num_threads = num_threads
        self._open()
        self._can_seek = self._container.format.name in SEEKABLE
        # AVI files store no times, only the decoding order.
        self._is_counted = self._container.format.name == "avi" and self._stream.codec_context.has_b_frames
        self._may_jump = self._can_seek and not self._is_counted

    def _open(self) -> None:
        self._container = self._open_container()
        try:
            self._stream = self._found()
        except BaseException:
            self._container.close()
            raise
        self._stream.codec_context.thread_count = self._num_threads
        # Larger frames than the first one are refused before they are allocated; includes the decoder's padding.
        self._stream.codec_context.options = {"max_pixels": str(min(2 * self._limits.max_frame_pixels, 2**31 - 1))}
        self._time_base = float(self._stream.time_base or 0) or 1.0
        self._rate = self._declared_rate()

    def close(self) -> None:
        self._current = self._next = self._frames = None
        self._container.close()

    def _found(self) -> Any:
        from av.stream import Disposition

        videos = [one for one in self._container.streams.video if not one.disposition & Disposition.attached_pic]
        if not videos:
            raise VideoError(self._name, "has no video stream")
        codec = getattr(videos[0].codec_context, "name", None)
        if codec is None:
            raise VideoError(self._name, "its codec is not supported")
        if self._limits.codecs and codec not in self._limits.codecs:
            raise VideoError(self._name, f"its codec {codec} is not accepted; use {', '.join(self._limits.codecs)}")
        return videos[0]

    # Duration

    def measure(self, counts: bool = False) -> tuple[int, float]:
        """Return the number of frames and the average frames per second.

        They come from the header if the file reaches its declared end; otherwise packets are counted. Matroska's header
        has no number: it is inferred from the time of the last frame, or counted if `counts` is set.
        """
        number, rate = self._stream.frames, self._rate
        num_packets, num_bytes = len(self._stream.index_entries), self._container.size
        if num_packets > num_bytes > 0:  # reading and decoding each would never end
            raise VideoError(self._name, f"has an index of {num_packets} packets, more than {num_bytes} bytes can have")
        end = self._end() if rate and self._can_seek else None
        if end is None:
            return self._counted()
        found = round(end * rate)
        if not number and 0 < found <= num_bytes and not counts:
            return found, rate
        return (number, rate) if abs(found - number) <= 1 else self._counted()

    @property
    def declared_seconds(self) -> float:
        """The duration that the header declares; 0 if it declares none."""
        if self._stream.duration:
            return self._stream.duration * self._time_base
        return (self._container.duration or 0) / 1_000_000

    @property
    def declared_size(self) -> tuple[int, int]:
        """Height and width that the header declares, before frames are turned; 0 if it declares none."""
        return self._stream.codec_context.height, self._stream.codec_context.width

    def _declared_rate(self) -> float | None:
        rate = float(self._stream.average_rate or 0)
        return rate if 0 < rate <= MAX_FPS else None

    def _end(self) -> float | None:
        """Return the seconds from the first frame to the end of the last one, from packets after the last keyframe."""
        start = self._stream.start_time
        if not self.declared_seconds or start is None:
            return None
        if not self._seek(start + round(self.declared_seconds / self._time_base)):
            return None
        ends = [end for _, end in self._packet_times() if end is not None]
        return (max(ends) - start) * self._time_base if ends else None

    def _counted(self) -> tuple[int, float]:
        self._rewind()
        times = [at for at, _ in self._packet_times()]
        known = [at for at in times if at is not None]
        seconds = (max(known) - min(known)) * self._time_base if known else 0
        number, rate = len(times), self._rate
        if number < 2 or not seconds or (rate and abs(seconds * rate - (number - 1)) < 0.5):
            return number, rate or 1.0
        return number, (number - 1) / seconds

    def _packet_times(self) -> Iterator[tuple[int | None, int | None]]:
        """Yield start and end of each packet that has a frame, in the order of the file."""
        for packet in self._packets():
            at = packet.dts if packet.pts is None else packet.pts
            if packet.size and not packet.is_discard:
                yield at, None if at is None else at + (packet.duration or 0)

    # Frames

    def begin(self) -> tuple[int, int] | None:
        """Go to the first frame, time 0 of `shown`; return its upright height and width, or None without a frame."""
        self._rewind()
        self._restart(lambda frame: True)
        start = self._stream.start_time
        if self._next is not None and start is not None and self._pts(self._next) > start and self._can_seek:
            self._reopen()
            self._restart(lambda frame: True)
        if self._next is None:
            return None
        self._is_counted |= self._next.pts is None and self._next.dts is None  # a raw stream without a container
        self._start, self._matrix = self._pts(self._next), display_matrix(self._next)
        self._keyframes = self._keyframe_times() if self._may_jump else []
        return upright_size(self._next.height, self._next.width, self._matrix)

    def shown(self, at: float, period: float) -> np.ndarray:
        """Return the upright frame for a time (see `is_later_shown`), (height, width, 3) uint8.

        Times must not decrease between calls. Raises FramesEnded if the packets for this time cannot be decoded.
        """
        self._approach(at + 0.1 * period)
        while self._next is not None and (
            self._current is None or is_later_shown(at, self._current_time, self._time(), period)
        ):
            self._step()
        if self._current is None:
            raise VideoError(self._name, "cannot be decoded, damaged or truncated")
        if self._next is None and min(at, self._end_of_packets) > self._current_time + LOST_PERIODS * period:
            raise FramesEnded(self._current_time)
        self._limits.check_size(self._name, self._current.height, self._current.width)
        return upright(self._current.to_ndarray(format="rgb24"), self._matrix)

    def _step(self) -> None:
        self._current_time = self._time()
        self._current, self._next = self._next, next(self._frames, None)
        self._num_passed += 1

    def _restart(self, is_first: Callable[[Any], bool]) -> None:
        self._frames, self._current, self._num_passed = self._decoded(), None, 0
        self._num_packets, self._last_packet = 0, None
        self._next = next((frame for frame in self._frames if is_first(frame)), None)

    def _time(self) -> float:
        """Return the start of the next frame in seconds."""
        if self._is_counted:
            return self._num_passed / (self._rate or 1.0)
        return (self._pts(self._next) - self._start) * self._time_base

    @property
    def _end_of_packets(self) -> float:
        """Seconds at which the last frame would begin if all packets up to here could be decoded."""
        if self._is_counted:
            return (self._num_packets - 1) / (self._rate or 1.0)
        return 0 if self._last_packet is None else (self._last_packet - self._start) * self._time_base

    def _pts(self, frame: Any) -> int:
        return (frame.dts or 0) if frame.pts is None else frame.pts

    def _decoded(self) -> Iterator[Any]:
        num_errors = 0
        for packet in self._packets():
            if packet.size and not packet.is_discard:
                self._num_packets += 1
                self._last_packet = max(self._pts(packet), self._last_packet or self._pts(packet))
            try:
                yield from packet.decode()
                num_errors = 0
            except (ValueError, OSError, EOFError) as error:  # FFmpeg's errors are among them
                if getattr(error, "errno", None) == errno.ENOMEM:
                    raise MemoryError from None  # intact frames must not be skipped
                num_errors += 1
                if num_errors == MAX_DECODER_ERRORS:
                    return

    def _packets(self) -> Iterator[Any]:
        num_errors = 0
        while num_errors < MAX_ERRORS:
            try:
                for packet in self._container.demux(self._stream):
                    num_errors = 0
                    yield packet
                return
            except EOFError:
                return
            except (ValueError, OSError):
                num_errors += 1

    # Seeking

    def _approach(self, end: float) -> None:
        """Seek to the last keyframe that is shown before `end`, if it is ahead."""
        i = bisect_left(self._keyframes, end) - 1
        if not self._may_jump or i < 0 or self._next is None or self._keyframes[i] <= self._time():
            return
        for seconds in reversed(self._keyframes[max(0, i - MAX_RETREATS) : i + 1]):
            if self._seek(self._start + round(seconds / self._time_base)):
                self._restart(lambda frame: frame.key_frame)  # frames before a keyframe are not complete
                if self._next is not None and self._time() < end:
                    return
        self._may_jump = False
        self._reopen()
        self._restart(lambda frame: True)

    def _keyframe_times(self) -> list[float]:
        """Return the seconds at which the keyframes in the file's index are shown.

        The index has decoding times, which precede presentation times by the same amount for most keyframes.
        """
        times = [entry.timestamp for entry in self._stream.index_entries if entry.is_keyframe]
        first = min(times, default=0)
        return sorted((time - first) * self._time_base for time in times)

    def _rewind(self) -> None:
        if not (self._can_seek and self._seek(self._stream.start_time or 0)):
            self._reopen()

    def _reopen(self) -> None:
        self._container.close()
        self._open()

    def _seek(self, timestamp: int) -> bool:
        try:
            self._container.seek(timestamp, stream=self._stream, backward=True)
        except (ValueError, OSError, EOFError, OverflowError):
            return False
        return True


def upright(pixels: np.ndarray, matrix: Matrix | None) -> np.ndarray:
    """Turn and mirror pixels, (height, width, 3) uint8, according to a display matrix."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    if abs(a) >= abs(b):
        return pixels[:: _stride(d), :: _stride(a)]
    return pixels.transpose(1, 0, 2)[:: _stride(b), :: _stride(c)]


def upright_size(height: int, width: int, matrix: Matrix | None) -> tuple[int, int]:
    """Return the height and width of a frame after `upright`."""
    is_turned = matrix is not None and abs(matrix[1]) > abs(matrix[0])
    return (width, height) if is_turned else (height, width)


def _stride(sign: int) -> int:
    return -1 if sign < 0 else 1


def display_matrix(frame: Any) -> Matrix | None:
    """Return the display matrix of a frame; None if it has none.

    Only the first frame is queried, because PyAV's side data and their frame form a reference cycle.
    """
    from av.sidedata.sidedata import Type

    side_data = frame.side_data.get(Type.DISPLAYMATRIX)
    if side_data is None:
        return None
    a, b, _, c, d = np.frombuffer(bytes(side_data), dtype=np.int32)[:5].tolist()
    return a, b, c, d
