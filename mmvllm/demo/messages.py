"""Messages for the page's visitors, who know neither the command line nor the engine's arguments."""

import html
from pathlib import Path

import gradio as gr

from mmvllm.demo.images import UploadError
from mmvllm.errors import DeadlineExceeded, EngineBusy, EngineUnavailable, PromptTooLong, RequestError, RequestFailed
from mmvllm.models.folder import BUNDLED_NAME
from mmvllm.utils.text import beginning_of

MAX_WARNING = 1000  # characters
BUNDLED_WARNING = (
    "This small demonstration model only knows drawings like its examples. About anything else, such as a photograph, "
    "it writes confident nonsense. To ask about pictures of your own, start the page with another model, as README.md "
    "describes."
)
NEEDS_IMAGE = "Add a picture first: this model answers questions about pictures only"
SMALL_COPIES = (
    "The pictures of this conversation are small copies that your browser has kept; to ask about details, "
    "add the picture again"
)
NO_COPIES = "The videos of this conversation are no longer here; to ask about them, add them again"


def spoken_model(model: str) -> str:
    """Return the page's name for the model, without its location on the server's disk."""
    if model == BUNDLED_NAME:
        return "mmvllm's bundled demonstration model"
    return Path(model).resolve().name if Path(model).is_dir() else model


def spoken(error: Exception) -> str:
    """Return the message that the page shows for an error."""
    match error:
        case UploadError():
            return error.reason  # names the file; `str(error)` adds its index
        case EngineBusy():
            return "Many people are asking right now; try again in a moment"
        case EngineUnavailable():
            return "The model is not running any more; the page has to be started again"
        case DeadlineExceeded():
            return "The answer took too long; ask for less, or try again later"
        case MemoryError():
            return "There is not enough memory for these files; use fewer or smaller ones"
        case RequestFailed():
            return "The model failed to answer this question; try again"
        case PromptTooLong():
            return (
                f"The conversation has {error.value:,} tokens, and the model takes fewer than {error.limit:,}: start a "
                "new conversation, or use fewer or smaller pictures and videos"
            )
        case RequestError(param="min_pixels"):
            return 'The settings say "fewest pixels" above "most pixels" of a picture or frame'
    return str(error)


def warn(error: Exception) -> None:
    gr.Warning(html.escape(beginning_of(spoken(error), MAX_WARNING)))
