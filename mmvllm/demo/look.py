"""How the page looks, and what comes through to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from starlette.middleware import Middleware

from mmvllm.demo.gate import Gate

if TYPE_CHECKING:
    from mmvllm.demo.page import Page

FONTS = ("sans-serif",)  # none that would have to be fetched; page.css names those of the system
# Whatever an answer says, the browser fetches nothing from elsewhere.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; base-uri 'self'"
LOOK = {
    "theme": gr.themes.Base(
        primary_hue="blue", neutral_hue="stone", font=FONTS, font_mono=("monospace",), radius_size="lg"
    ).set(
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        button_primary_background_fill="*primary_600",
    ),
    "css": (Path(__file__).parent / "page.css").read_text(encoding="utf-8"),
    "head": f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
    "footer_links": [],
    "run_history": False,
    "ssr_mode": False,
    "mcp_server": False,
    "pwa": False,
    "enable_monitoring": False,
}


def launch_options(page: "Page") -> dict[str, Any]:
    """Arguments of gradio's `launch` and `mount_gradio_app`; made anew for each, since gradio changes `app_kwargs`."""
    return LOOK | {"app_kwargs": {"middleware": [Middleware(Gate, sessions=page.sessions)]}}
