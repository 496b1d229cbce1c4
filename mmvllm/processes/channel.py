"""Messages between a process and its parent: objects go through a pipe, their large buffers through shared memory.

A pipe transfers an array in pieces of about 64 KiB, and both processes wait for each other at every piece. Shared
memory takes one copy on each side, and the reader copies without holding the GIL.
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

SHARED_BYTES = 128 * 1024 * 1024  # allocated as it is written to; larger messages go through the pipe
KEPT_BYTES = 8 * 1024 * 1024  # after a larger message, the memory is returned to the system
_ALIGNMENT = 64


class SharedBuffer:
    """Memory shared by two processes; can be pickled only as an argument of a process that is started.

    It is anonymous: the system frees it when the last process that has it open ends, even by a crash.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, SHARED_BYTES)  # no effect in the started process
        self._map = mmap.mmap(descriptor, SHARED_BYTES)

    def __reduce__(self):
        return _attached, (DupFd(self._descriptor),)

    @classmethod
    def create(cls) -> "SharedBuffer | None":
        """Create a buffer; return None if the system does not support it."""
        if not hasattr(os, "memfd_create"):  # not Linux
            return None
        with suppress(OSError):  # forbidden by a sandbox, or beyond the address space limit
            return cls(os.memfd_create("mmvllm-worker"))
        return None

    def write(self, views: list[memoryview]) -> bool:
        """Write all views if there is room for them; return whether they were written."""
        *starts, end = _starts([view.nbytes for view in views])
        if end > SHARED_BYTES:
            return False
        for start, view in zip(starts, views, strict=True):
            self._map[start : start + view.nbytes] = view
        return True

    def read(self, sizes: list[int]) -> "list[np.ndarray]":
        """Return copies of the buffers that were written."""
        *starts, end = _starts(sizes)
        copies = [self._copy(start, size) for start, size in zip(starts, sizes, strict=True)]
        if end > KEPT_BYTES:
            with suppress(OSError):  # some sandboxes do not support it
                self._map.madvise(mmap.MADV_REMOVE)
        return copies

    def _copy(self, start: int, size: int) -> "np.ndarray":
        import numpy as np  # imported late: workers set their number of threads before they import numpy

        own = np.empty(size, np.uint8)
        np.copyto(own, memoryview(self._map)[start : start + size])
        return own


def _attached(descriptor: Any) -> SharedBuffer:
    return SharedBuffer(descriptor.detach())


def _starts(sizes: list[int]) -> list[int]:
    """Return the aligned offset of each buffer, followed by the end of the last one."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


class PackedMessage:
    """A pickled object, ready to be sent to one or several processes; large buffers such as pixels are not copied.

    Raises the errors of pickling.
    """

    def __init__(self, message: Any):
        buffers: list[pickle.PickleBuffer] = []
        self.data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self.views = [buffer.raw() for buffer in buffers]
        self.sizes = [view.nbytes for view in self.views]


def pickled(part: Any) -> bytes:
    """Pickle a part of a message separately, so that the receiver can handle an error of `unpickled`."""
    return pickle.dumps(part)


def unpickled(data: bytes) -> Any:
    """Unpickle a part of a message; raises any exception that its classes raise."""
    return pickle.loads(data)


def can_be_sent(message: Any) -> bool:
    """Return whether a message survives pickling and unpickling, which some exceptions do not."""
    try:
        pickle.loads(pickle.dumps(message))
    except Exception:
        return False
    return True


class Channel:
    """One end of a connection for messages; used by one thread at a time.

    Messages use the buffers in turn. With one buffer, both ends may write to it, because they alternate: each end
    receives and copies a message before it sends the next. With several buffers, only one end writes to them, and as
    many messages may be in flight.
    """

    def __init__(self, pipe: Connection, *buffers: SharedBuffer | None):
        self.pipe = pipe
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        self._num_written = 0

    def close(self) -> None:
        """Release the pipe and the memory, which the traceback of a kept exception could otherwise keep alive."""
        self.pipe.close()
        self._buffers = []

    def send(self, message: Any) -> None:
        """Send an object; raises OSError if the other end is closed. If pickling fails, nothing is sent."""
        self.send_packed(PackedMessage(message))

    def send_packed(self, message: PackedMessage) -> None:
        """Send a packed message; raises OSError if the other end is closed."""
        slot = self._write(message.views)
        self.pipe.send_bytes(pickle.dumps((slot, message.sizes, message.data)))
        for view in message.views if slot is None else ():
            self.pipe.send_bytes(view)

    def _write(self, views: list[memoryview]) -> int | None:
        """Write the views to a buffer and return its index; None if they must go through the pipe."""
        if not (views and self._buffers):
            return None
        slot = self._num_written % len(self._buffers)
        if not self._buffers[slot].write(views):
            return None
        self._num_written += 1
        return slot

    def receive(self) -> Any:
        """Wait for an object; raises EOFError or OSError if the other end is closed."""
        slot, sizes, data = pickle.loads(self.pipe.recv_bytes())
        buffers = [*map(self._piece, sizes)] if slot is None else self._buffers[slot].read(sizes)
        return pickle.loads(data, buffers=buffers)

    def _piece(self, size: int) -> bytearray:
        own = bytearray(size)
        self.pipe.recv_bytes_into(own)
        return own
