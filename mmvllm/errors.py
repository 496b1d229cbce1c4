"""Exceptions that users see; their attributes hold the facts that their messages state."""

from collections.abc import Callable
from string import Formatter
from typing import Any, TypeVar

from mmvllm.utils.text import counted, shown

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Return the error without its traceback and causes, whose frames may keep decoded images in memory."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error; CUDA errors continue with advice on debugging."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class RequestError(ValueError):
    """A request that cannot be served.

    Args:
        reason: the value, the requirement and the remedy, without the position in the call.
        request_index: index of the request in the call, from 0.
        image_index, video_index: index of the image or video in the request, from 0.
        param: the field or parameter of the request that is wrong.
        value: its value; `limit`: the maximum.
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
        """Return this error `without_frames`."""
        return without_frames(self)

    def __reduce__(self):
        """Pickle the text and the facts without a traceback, because worker processes send errors back."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[RequestError], args: tuple, facts: dict[str, Any]) -> RequestError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class ParameterError(RequestError):
    """A sampling parameter, or another field of a request, has an invalid value."""

    def __init__(self, param: str, value: Any, required: str):
        super().__init__(f"{param} must be {required}, got {shown(value)}", param=param, value=value)


class MediaFileError(RequestError):
    """A file that cannot be read or decoded; messages call it `source`, which is "" if the reason names it."""

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
    """A prompt that leaves no room for a completion; `value` is its number of tokens, `limit` the model's maximum.

    Clients that shorten a conversation recognize the error by the words "maximum context length is".
    """

    def __init__(self, problem: str, advice: str, *, value: int, limit: int):
        reason = f"{problem}, the maximum context length is {limit} tokens (max_model_len); {advice}"
        super().__init__(reason, value=value, limit=limit)


class ArgumentError(ValueError):
    """Arguments of a Python function that contradict each other or the files on disk.

    `template` names arguments in braces, such as `{overwrite}`, unless `values` has their value. `str` writes them as
    in Python. The command line writes options: `error.format(lambda name: "--" + name.replace("_", "-"))`.
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
    """The engine does not accept requests now."""


class EngineBusy(EngineUnavailable):
    """The number of requests served or waiting (`value`) has reached the `limit`; try again later."""

    def __init__(self, value: int, limit: int):
        verb = "is" if value == 1 else "are"
        super().__init__(f"{counted(value, 'request')} {verb} being served or waiting; try again later")
        self.value, self.limit = value, limit

    def __reduce__(self):
        return type(self), (self.value, self.limit)


class EngineStopped(EngineUnavailable):
    """The engine is shutting down or has shut down."""


class EngineFailed(EngineUnavailable):
    """The engine failed and serves no more requests; the text says why."""


class RequestFailed(RuntimeError):
    """A step of this request failed on the device, or preparing the request failed; other requests may succeed."""


class RequestsAborted(RuntimeError):
    """Requests of a call were aborted from outside.

    `outputs` has all outputs in order, but for a stream, which has yielded all of them, only the aborted ones.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self):
        return type(self), (str(self), self.outputs)


class DeadlineExceeded(TimeoutError):
    """The request did not finish before its deadline."""
