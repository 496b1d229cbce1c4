"""What can go wrong with a request that was in order; one that was not is a ValueError."""


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


class EngineUnavailable(RuntimeError):
    """The engine takes no request now."""


class EngineBusy(EngineUnavailable):
    """As many requests wait as may; try again later."""


class EngineStopped(EngineUnavailable):
    """The engine is shutting down, or has."""


class EngineFailed(EngineUnavailable):
    """The engine broke, and serves nothing any more; the text says why."""


class RequestFailed(RuntimeError):
    """The device failed in a step of this request, or the engine in preparing it; others may do well."""


class DeadlineExceeded(TimeoutError):
    """The request was not finished in the time that it was given."""
