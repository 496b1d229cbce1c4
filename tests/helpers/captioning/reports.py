"""Caption records, and reports as a browser reads them."""

import base64
import io
import json
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from mmvllm.captioning.outputs.report import write_report

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "</title></style><!-- <script> -->",
    "<!--<script>",
    '"><img src=x onerror="window.hacked = 1">',
    "'; window.hacked = 1; '",
    "{{records}} {{curve}} {{title}} \\g<0> \\1 $1",
    "line\nbreak\r\ttab\0nul",
    "\u2028\u2029\ufeff\u202e&lt;&amp;",
    "caf\udce9.jpg \ud800",
    "javascript:window.hacked=1",
]


def record(path: str | Path, **keys) -> dict:
    return {
        "path": str(path),
        "id": None,
        "digest": "00" * 16,
        "caption": "a caption",
        "error": None,
        "duplicate_of": None,
        "width": 60,
        "height": 40,
        "prompt_tokens": 30,
        "image_tokens": 20,
        "completion_tokens": 5,
        "finish_reason": "eos",
        "seconds": 0.5,
        "time": 1.8e9,
        "model": "model",
        "prompt": "prompt",
        "key": "key",
        "settings": "settings",
    } | keys


class Page(HTMLParser):
    """The elements of a page with their attributes and texts, and its records."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict, list[str]]] = []
        self.comments: list[str] = []
        self._open: list[tuple[str, dict, list[str]]] = []
        self.feed(text)
        self.close()
        blocks = {"records": [], "lines": [], "thumbnails": []}
        for tag, attributes, texts in self.elements:
            if tag == "script" and attributes:
                blocks[attributes["class"]] += json.loads("".join(texts))
        self.records, self.lines, self.thumbnails = blocks.values()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in ("meta", "link", "input"):
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1][2].append(data)

    def handle_comment(self, data):
        self.comments.append(data)

    def all(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]


def page(path: Path, records, summary=None, **keys) -> Page:
    write_report(path, records, summary or {}, **keys)
    return Page(path.read_bytes().decode())


def pixels(thumbnail: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(thumbnail))))


@contextmanager
def opened(chromium, path: Path, **options):
    """The page in a tab; messages on the console, dialogs and requests fail the test."""
    context = chromium.new_context(**options)
    tab, complaints = context.new_page(), []

    def check(request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            complaints.append(request.url)

    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    tab.on("request", check)
    tab.goto(path.as_uri())
    yield tab
    context.close()
    assert complaints == []
