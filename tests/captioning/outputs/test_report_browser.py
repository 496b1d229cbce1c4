"""The report in a browser: thumbnails, search, filters, untrusted text, and layout."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvllm.captioning.outputs import thumbnails
from mmvllm.captioning.outputs.report import write_report
from mmvllm.processors.images.load import load_image
from tests.helpers.captioning.reports import HOSTILE, opened, record
from tests.helpers.engine.requests import noise_image

WIDTH = "image => image.decode().then(() => image.naturalWidth)"


def widths(tab) -> list[int]:
    """The widths of the decoded thumbnails."""
    return [image.evaluate(WIDTH) for image in tab.locator("img").all()]


def shown_names(tab) -> list[str]:
    return tab.locator(".card .name").all_text_contents()


@pytest.fixture
def small_report(tmp_path, colors) -> Path:
    captions = ["A red cat sits", "The Red dog", "a CAFÉ table", "nothing", "long " * 200]
    records = [record(path, caption=caption) for path, caption in zip(colors, captions, strict=False)]
    records += [
        record(tmp_path / "gone.png", caption=None, error="no such file: a red herring"),
        record(colors[6], caption="A red cat sits", duplicate_of=str(colors[0])),
        record("https://example.com/web.png", caption="from the web"),
    ]
    write_report(path := tmp_path / "report.html", records, {"Model": "a model"})
    return path


@pytest.mark.browser
def test_thumbnails_are_displayed(chromium, small_report):
    with opened(chromium, small_report) as tab:
        assert shown_names(tab) == ["0.png", "1.png", "2.png", "3.png", "4.png", "gone.png", "6.png", "web.png"]
        assert widths(tab) == [60] * 6
        assert tab.locator(".thumbnail").all_text_contents()[-3:] == ["No preview", "", "On the web"]
        assert tab.locator(".card").nth(6).locator(".duplicate").text_content() == "Same image as 0.png"
        first = tab.locator(".card").first
        assert first.locator(".name").get_attribute("title") == str(small_report.parent / "0.png")
        assert "60\u00a0\u00d7\u00a040" in first.locator(".small").text_content()


@pytest.mark.browser
@pytest.mark.parametrize(
    "words, want",
    [
        ("", 8),
        ("red", ["0.png", "1.png", "gone.png", "6.png"]),
        ("RED  Cat", ["0.png", "6.png"]),
        ("cat red 0.png", ["0.png"]),
        ("café", ["2.png"]),
        ("cafe\u0301", ["2.png"]),
        ("no such", ["gone.png"]),
        ("example.com", ["web.png"]),
        ("red zebra", []),
    ],
)
def test_the_search_matches_all_words_and_ignores_case(words, want, chromium, small_report):
    with opened(chromium, small_report) as tab:
        tab.get_by_label("Search").fill(words)
        assert (len(shown_names(tab)) if words == "" else shown_names(tab)) == want
        number = want if words == "" else len(want)
        assert tab.locator("#matches").text_content() == f"{number} of 8"
        assert tab.locator("#nothing").is_visible() == (number == 0)


@pytest.mark.browser
def test_the_buttons_filter_with_the_keyboard_and_with_the_search(chromium, small_report):
    with opened(chromium, small_report) as tab:
        assert tab.locator(".filters button").all_text_contents() == [
            "All 8",
            "Captioned 7",
            "Failed 1",
            "Duplicates 1",
        ]
        tab.get_by_label("Search").fill("red")
        for keys, want in ((3, ["gone.png"]), (1, ["6.png"])):
            for _ in range(keys):
                tab.keyboard.press("Tab")
            tab.keyboard.press("Enter")
            assert shown_names(tab) == want
        assert tab.locator("[aria-pressed=true]").all_text_contents() == ["Duplicates 1"]


@pytest.mark.browser
def test_a_click_opens_the_image(chromium, small_report):
    with opened(chromium, small_report) as tab:
        links = tab.locator("a.thumbnail")
        assert {link.get_attribute("rel") for link in links.all()} == {"noopener noreferrer"}
        with tab.context.expect_page() as popup:
            links.first.click()
        popup.value.wait_for_load_state()
        assert popup.value.url == (small_report.parent / "0.png").as_uri()
        assert popup.value.evaluate("document.images[0].naturalWidth") == 60


@pytest.mark.browser
def test_a_long_caption_can_be_expanded(chromium, small_report):
    with opened(chromium, small_report) as tab:
        caption, more = tab.locator(".card").nth(4).locator(".caption"), tab.locator(".more")
        folded = caption.bounding_box()["height"]
        more.click()
        assert caption.bounding_box()["height"] > 2 * folded
        assert (more.text_content(), more.get_attribute("aria-expanded")) == ("Show less", "true")


@pytest.mark.browser
def test_hostile_text_is_only_text(chromium, tmp_path):
    records = [record(tmp_path / "no.png", caption=text, id=text) for text in HOSTILE]
    records += [record(text, caption=None, error=text, duplicate_of=text) for text in HOSTILE]
    name = tmp_path / "<img src=x onerror=window.hacked=1>.png"
    noise_image(20, 20).save(name)
    records.append(record(name))
    write_report(tmp_path / "report.html", records, {text: text for text in HOSTILE}, title=HOSTILE[1])
    with opened(chromium, tmp_path / "report.html") as tab:
        assert tab.title() == HOSTILE[1]
        assert tab.evaluate("window.hacked") is None
        shown = tab.locator(".caption").all_text_contents()
        assert shown[: len(HOSTILE)] == [text.encode("utf-8", "backslashreplace").decode() for text in HOSTILE]
        assert shown_names(tab)[-1] == name.name
        assert tab.locator("img").count() == tab.locator("a[href]").count() == 1


@pytest.mark.browser
def test_the_policy_blocks_an_injected_script(chromium, tmp_path):
    write_report(path := tmp_path / "report.html", [record("gone.png")], {})
    path.write_text(path.read_text().replace("<header>", "<script>window.hacked = 1</script><header>"))
    context = chromium.new_context()
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert shown_names(tab) == ["gone.png"] and tab.evaluate("window.hacked") is None
    context.close()


@pytest.fixture(scope="module")
def large_report(tmp_path_factory) -> Path:
    """10,000 images with thumbnails of a few KB, made from one noise image."""
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    thumbnail = thumbnails.as_webp(load_image(folder / "noise.png"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thumbnails, "thumbnail", lambda *_: thumbnail)
        records = (
            record(f"folder/{i}.png", caption=f"number {i} " + "word " * 30, time=1.8e9 + i) for i in range(10_000)
        )
        write_report(folder / "report.html", records, {"Model": "a model"})
    return folder / "report.html"


@pytest.mark.browser
def test_ten_thousand_images_open_fast_and_load_on_scrolling(chromium, large_report):
    start = time.perf_counter()
    with opened(chromium, large_report) as tab:
        assert tab.locator("img").first.evaluate(WIDTH) == 120
        assert time.perf_counter() - start < 40
        before = tab.locator(".card").count()
        assert 100 <= before <= 1000
        for _ in range(3):
            tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            tab.locator(".card").nth(before).wait_for(state="attached")
            before = tab.locator(".card").count()
        tab.get_by_label("Search").fill("number 9999")
        assert shown_names(tab) == ["9999.png"]
        assert widths(tab) == [120]


@pytest.mark.browser
def test_all_images_can_be_reached_by_scrolling(chromium, tmp_path):
    write_report(path := tmp_path / "report.html", [record(f"{i}.png") for i in range(1050)], {})
    with opened(chromium, path) as tab:
        deadline = time.monotonic() + 60
        while tab.locator(".card").count() < 1050 and time.monotonic() < deadline:
            tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            tab.wait_for_timeout(50)
        assert shown_names(tab) == [f"{i}.png" for i in range(1050)]


@pytest.mark.browser
@pytest.mark.parametrize("scheme, dark", [("light", False), ("dark", True)])
@pytest.mark.parametrize("width", [320, 375, 768, 1920])
def test_every_width_and_scheme_fits(scheme, dark, width, chromium, tmp_path):
    long = "an-unbroken-name-" * 20
    records = [
        record(f"{long}.png", caption=long, duplicate_of=long, time=1.8e9 + i, error=long if i % 2 else None)
        for i in range(100)
    ]
    write_report(path := tmp_path / "report.html", records, {long: long}, title=long)
    with opened(chromium, path, viewport={"width": width, "height": 800}, color_scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", color))) < 60) == dark
        tab.evaluate("scrollTo(0, 2000)")
        assert tab.locator(".bar").bounding_box()["y"] == 0
