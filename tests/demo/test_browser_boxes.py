"""Boxes of an answer are drawn over the image, in the conversation and enlarged."""

import pytest
from PIL import Image

from tests.helpers.engine.scripted import script
from tests.helpers.serving.browser import SCENE, opened

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]
ANSWER = "<|object_ref_start|>a <b>star</b><|object_ref_end|><|box_start|>(250,500),(750,1000)<|box_end|> there"
ANSWER += "<|box_start|>(500,250)<|box_end|>"


def place(outer: dict, inner: dict) -> list[float]:
    """Left, top, width and height of one element as parts of another's."""
    x, y = ((inner[name] - outer[name]) / outer[size] for name, size in (("x", "width"), ("y", "height")))
    return [x, y, inner["width"] / outer["width"], inner["height"] / outer["height"]]


@pytest.fixture
def turned(tmp_path):
    """An image that is stored on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(SCENE) as scene:
        half = scene.convert("RGB").crop((0, 0, scene.width, scene.height // 2))
        half.save(tmp_path / "turned.jpg", exif=exif)
    return tmp_path / "turned.jpg"


@pytest.mark.parametrize("is_turned", [False, True])
def test_boxes_are_drawn_over_the_image(is_turned, turned, chromium, site, monkeypatch):
    path = turned if is_turned else SCENE
    script(monkeypatch, site.engine.tokenizer, ANSWER)
    with opened(chromium, site) as tab:
        page, boxes = tab.page, tab.page.locator("#chat .boxes")
        tab.answer_to("Where is it?", path)
        boxes.wait_for()
        image, rect = page.locator("#chat .component img").bounding_box(), boxes.locator("rect").bounding_box()
        with Image.open(path) as stored:
            width, height = stored.size[::-1] if is_turned else stored.size
        assert image["width"] / image["height"] == pytest.approx(width / height, abs=0.02)
        assert place(image, rect) == pytest.approx([0.25, 0.5, 0.5, 0.5], abs=0.04)
        assert boxes.locator("text").text_content() == "a <b>star</b>" and boxes.locator("circle").count() == 1
        page.get_by_role("button", name=f"Enlarge {path.name}").click()
        large = page.locator("#enlarged rect")
        large.wait_for()
        assert large.bounding_box()["width"] > 2 * rect["width"]
        page.keyboard.press("Escape")
        page.locator("#enlarged").wait_for(state="detached")
