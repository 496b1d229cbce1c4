"""Messages between a process and its parent: objects through a pipe, their large buffers through shared memory.

An array goes through a pipe in pieces of some 64 KiB, and both processes wait for each other at each. Shared memory
takes one copy on either side, and the reader does not hold the interpreter lock for its own.
"""

import mmap
import os
import pickle
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SHARED_BYTES = 128 * 1024 * 1024  # takes memory where it is written to only; larger messages go through the pipe
KEPT_BYTES = 8 * 1024 * 1024  # after a larger message the memory is given back
_ALIGNMENT = 64


class SharedBuffer:
    """Memory that two processes see; can be pickled only as an argument of a process that is started.

    It has no name: the system frees it with the last process that has it open, however that process ends.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, SHARED_BYTES)  # of a process that is started, it has this size already
        self._map = mmap.mmap(descriptor, SHARED_BYTES)

    def __reduce__(self):
        return _attached, (DupFd(self._descriptor),)

    @classmethod
    def create(cls) -> "SharedBuffer | None":
        """None where the system has no such memory."""
        if not hasattr(os, "memfd_create"):  # not Linux
            return None
        with suppress(OSError):  # a sandbox without it, or a limit of the address space
            return cls(os.memfd_create("mmvllm-worker"))
        return None

    def write(self, views: list[memoryview]) -> bool:
        """Whether there was room for all views, which are then written."""
        *starts, end = _starts([view.nbytes for view in views])
        if end > SHARED_BYTES:
            return False
        for start, view in zip(starts, views, strict=True):
            self._map[start : start + view.nbytes] = view
        return True

    def read(self, sizes: list[int]) -> "list[np.ndarray]":
        """Copies of what was written."""
        *starts, end = _starts(sizes)
        copies = [self._copy(start, size) for start, size in zip(starts, sizes, strict=True)]
        if end > KEPT_BYTES:
            with suppress(OSError):  # a sandbox that cannot
                self._map.madvise(mmap.MADV_REMOVE)
        return copies

    def _copy(self, start: int, size: int) -> "np.ndarray":
        import numpy as np  # not above: processes import this file, and choose the number of threads before numpy is

        own = np.empty(size, np.uint8)
        np.copyto(own, memoryview(self._map)[start : start + size])
        return own


def _attached(descriptor: Any) -> SharedBuffer:
    return SharedBuffer(descriptor.detach())


def _starts(sizes: list[int]) -> list[int]:
    """Where each begins, and where the next one would."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


class PackedMessage:
    """An object ready to be sent, to several processes if need be; large buffers in it, such as pixels, are not copied.

    Raises what pickling raises.
    """

    def __init__(self, message: Any):
        buffers: list[pickle.PickleBuffer] = []
        self.data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self.views = [buffer.raw() for buffer in buffers]
        self.sizes = [view.nbytes for view in self.views]


def pickled(part: Any) -> bytes:
    """A part of a message that its receiver makes again by itself, with `unpickled`, because it may be unable to."""
    return pickle.dumps(part)


def unpickled(data: bytes) -> Any:
    """Raises whatever making it raises."""
    return pickle.loads(data)


def can_be_sent(message: Any) -> bool:
    """Whether it can be pickled and unpickled, which some errors cannot."""
    try:
        pickle.loads(pickle.dumps(message))
    except Exception:
        return False
    return True


class Channel:
    """One end of the messages; used by one thread at a time.

    Messages use the buffers in turn. With one buffer the ends take turns: one has received a message, and copied it,
    before it sends the next one, so that both may write to the same memory. With more, which only one end writes to,
    as many messages may be on their way.
    """

    def __init__(self, pipe: Connection, *buffers: SharedBuffer | None):
        self.pipe = pipe
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        self._num_written = 0

    def close(self) -> None:
        """Give up the pipe and the memory, which an error of this end may otherwise hold as long as it is kept."""
        self.pipe.close()
        self._buffers = []

    def send(self, message: Any) -> None:
        """Send an object; raises OSError if there is no other end, and what pickling raises, with nothing sent."""
        self.send_packed(PackedMessage(message))

    def send_packed(self, message: PackedMessage) -> None:
        """`send`, for a message that is packed already."""
        place = self._write(message.views)
        self.pipe.send_bytes(pickle.dumps((place, message.sizes, message.data)))
        for view in message.views if place is None else ():
            self.pipe.send_bytes(view)

    def _write(self, views: list[memoryview]) -> int | None:
        """Which buffer has the views; None if they go through the pipe."""
        if not (views and self._buffers):
            return None
        place = self._num_written % len(self._buffers)
        if not self._buffers[place].write(views):
            return None
        self._num_written += 1
        return place

    def receive(self) -> Any:
        """Wait for an object; raises EOFError or OSError if there is no other end."""
        place, sizes, data = pickle.loads(self.pipe.recv_bytes())
        buffers = [*map(self._piece, sizes)] if place is None else self._buffers[place].read(sizes)
        return pickle.loads(data, buffers=buffers)

    def _piece(self, size: int) -> bytearray:
        own = bytearray(size)
        self.pipe.recv_bytes_into(own)
        return own
