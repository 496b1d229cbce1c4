"""Mounts the demo page on the server; needs the extras `serve` and `demo`."""

import gradio
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse

from mmvllm.demo.page import build_page
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.theme import launch_options
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.decoding import MediaDecoder
from mmvllm.server.settings import ServerSettings

PATH = "/demo"


def mount(app: FastAPI, engine: AsyncLLM, settings: ServerSettings, decoder: MediaDecoder) -> None:
    """Mount the page at `PATH`, with the server's limits, and redirect the root to it."""

    @app.get("/", include_in_schema=False)
    @app.get("/favicon.ico", include_in_schema=False)  # browsers request it from the root only
    async def root(request: Request) -> RedirectResponse:
        return RedirectResponse(f"{PATH}{request.url.path}")

    page_settings = DemoSettings(
        settings.media,
        settings.max_images,
        settings.max_videos,
        timeout=settings.request_timeout,
        uses_generation_config=settings.uses_generation_config,
        chat_template_kwargs=settings.chat_template_kwargs,
    )
    page = build_page(engine, page_settings, decoder)
    gradio.mount_gradio_app(app, page, PATH, **launch_options(page))
