"""The page's theme and launch options."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from starlette.middleware import Middleware

from mmvllm.demo.route_filter import DemoRouteFilter

if TYPE_CHECKING:
    from mmvllm.demo.page import Page

FONTS = ("sans-serif",)  # web fonts would have to be fetched; page.css names system fonts
# The browser fetches nothing from other hosts, whatever an answer contains.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; base-uri 'self'"
STATIC = Path(__file__).parent / "static"
SCRIPT = (STATIC / "page.js").read_text(encoding="utf-8")
LOOK = {
    "theme": gr.themes.Base(
        primary_hue="blue", neutral_hue="stone", font=FONTS, font_mono=("monospace",), radius_size="lg"
    ).set(
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        button_primary_background_fill="*primary_600",
    ),
    "css": (STATIC / "page.css").read_text(encoding="utf-8"),
    "head": f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><script>{SCRIPT}</script>',
    "footer_links": [],
    "run_history": False,
    "ssr_mode": False,
    "mcp_server": False,
    "pwa": False,
    "enable_monitoring": False,
}


def launch_options(page: "Page") -> dict[str, Any]:
    """Return arguments for gradio's `launch` and `mount_gradio_app`: a new dict, since gradio modifies it."""
    events = {index for index, event in page.fns.items() if event.fn}  # the others run in the browser
    filtered = Middleware(DemoRouteFilter, sessions=page.sessions, events=events, results=page)
    own = {"middleware": [filtered]}
    return LOOK | {"app_kwargs": own, "max_file_size": page.sessions.settings.max_file_bytes}
