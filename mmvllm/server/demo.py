"""The demo page on the server's engine; needs the extra `demo` too."""

import gradio
from fastapi import FastAPI
from starlette.responses import RedirectResponse

from mmvllm.async_llm import AsyncLLM
from mmvllm.demo.handlers import DemoSettings
from mmvllm.demo.look import LOOK
from mmvllm.demo.page import build_page
from mmvllm.media import MediaPolicy

PATH = "/demo"


def mount(app: FastAPI, engine: AsyncLLM, media: MediaPolicy) -> None:
    """Serve the page at `PATH`, and lead there from the root."""

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse(f"{PATH}/")

    page = build_page(engine, DemoSettings(media))
    gradio.mount_gradio_app(app, page, PATH, max_file_size=media.max_bytes, **LOOK)
