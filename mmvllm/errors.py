"""The errors that users see, with their facts as attributes; the messages are made from these facts."""

from collections.abc import Callable
from string import Formatter
from typing import Any, TypeVar

from mmvllm.utils.text import counted, shown

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error for keeping: its text and facts, without traceback and causes, whose frames may hold decoded images."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def first_line(error: BaseException) -> str:
    """The class and the first line of an error; CUDA's go on with advice on debugging."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class RequestError(ValueError):
    """A request that cannot be served as it is.

    Args:
        reason: what came, what was needed and what to do, without saying where.
        request_index: which request of a call, from 0.
        image_index, video_index: which image or video of the request, from 0.
        param: the field or parameter of the request that is wrong.
        value: what it was; `limit`: what it may be at most.
    """

    def __init__(
        self,
        reason: str,
        *,
        request_index: int | None = None,
        image_index: int | None = None,
        video_index: int | None = None,
        param: str | None = None,
        value: Any = None,
        limit: Any = None,
    ):
        super().__init__(reason)
        self.reason = reason
        self.request_index, self.noun = request_index, "request"
        self.image_index, self.video_index = image_index, video_index
        self.param, self.value, self.limit = param, value, limit

    def __str__(self) -> str:
        return f"{self._place}{self.reason}"

    @property
    def _place(self) -> str:
        request = "" if self.request_index is None else f"{self.noun} {self.request_index}: "
        image = "" if self.image_index is None else f"image {self.image_index}: "
        video = "" if self.video_index is None else f"video {self.video_index}: "
        return request + image + video

    def detached(self) -> "RequestError":
        """This error `without_frames`."""
        return without_frames(self)

    def __reduce__(self):
        """Worker processes send errors back: text and facts, no traceback."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[RequestError], args: tuple, facts: dict[str, Any]) -> RequestError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class ParameterError(RequestError):
    """A sampling parameter, or another field of a request, with a value that it cannot have."""

    def __init__(self, param: str, value: Any, required: str):
        super().__init__(f"{param} must be {required}, got {shown(value)}", param=param, value=value)


class MediaFileError(RequestError):
    """What cannot be read or decoded; `source` is what messages call it, "" if the reason says it."""

    def __init__(self, source: str, reason: str):
        super().__init__(reason)
        self.source = source

    def __str__(self) -> str:
        return f"{self._place}{self.source}: {self.reason}" if self.source else super().__str__()


class ImageError(MediaFileError):
    """An image that cannot be read or decoded."""


class VideoError(MediaFileError):
    """A video that cannot be read or decoded."""


class PromptTooLong(RequestError):
    """A prompt that leaves no room for a completion; `value` is its tokens, `limit` the model's.

    Clients that shorten a conversation recognize the error by the words "maximum context length is".
    """

    def __init__(self, problem: str, advice: str, *, value: int, limit: int):
        reason = f"{problem}, the maximum context length is {limit} tokens (max_model_len); {advice}"
        super().__init__(reason, value=value, limit=limit)


class ArgumentError(ValueError):
    """Arguments of a Python function that do not fit together, or do not fit what is on disk.

    `template` names arguments in braces, `{overwrite}`, unless `values` has a value to put there. `str` writes them as
    Python does. The command line writes options: `error.format(lambda name: "--" + name.replace("_", "-"))`.
    """

    def __init__(self, template: str, **values: Any):
        super().__init__(template)
        self.template, self.values = template, values

    def __str__(self) -> str:
        return self.format(lambda name: name)

    def format(self, format_name: Callable[[str], str]) -> str:
        return Formatter().vformat(self.template, (), _Names(format_name, self.values))


class _Names(dict):
    def __init__(self, format_name: Callable[[str], str], values: dict[str, Any]):
        super().__init__(values)
        self._format_name = format_name

    def __missing__(self, name: str) -> str:
        return self._format_name(name)


class EngineUnavailable(RuntimeError):
    """The engine takes no request now."""


class EngineBusy(EngineUnavailable):
    """The number of requests served or waiting (`value`) has reached the `limit`; try again later."""

    def __init__(self, value: int, limit: int):
        verb = "is" if value == 1 else "are"
        super().__init__(f"{counted(value, 'request')} {verb} being served or waiting; try again later")
        self.value, self.limit = value, limit

    def __reduce__(self):
        return type(self), (self.value, self.limit)


class EngineStopped(EngineUnavailable):
    """The engine is shutting down, or has."""


class EngineFailed(EngineUnavailable):
    """The engine failed and serves no more requests; the text says why."""


class RequestFailed(RuntimeError):
    """The device failed in a step of this request, or the engine in preparing it; other requests may succeed."""


class RequestsAborted(RuntimeError):
    """Requests of a call were aborted from outside.

    `outputs` has all outputs in order; for a stream, which has yielded all of them, only the aborted ones.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self):
        return type(self), (str(self), self.outputs)


class DeadlineExceeded(TimeoutError):
    """The request was not finished in the time that it was given."""
