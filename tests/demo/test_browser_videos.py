"""Videos on the page in a real browser: dropped, counted, played, asked about."""

import re
import shutil

import pytest

from tests.helpers.media.videos import make_clip
from tests.helpers.serving.browser import SCENE, opened, uploaded
from tests.helpers.serving.pages import until

pytest.importorskip("gradio")
pytest.importorskip("av")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Three seconds that a browser plays, and the same in a format that it does not play."""
    folder = tmp_path_factory.mktemp("clips")
    return {
        "webm": make_clip(folder / "clip.webm", codec="libvpx-vp9"),
        "mp4": make_clip(folder / "clip.mp4"),
        "avi": make_clip(folder / "clip.avi", codec="mpeg4"),
    }


def cost(tab) -> str:
    return tab.page.locator("#cost").inner_text()


@pytest.mark.parametrize("kind, suffix", [("drop", "webm"), ("paste", "mp4")])
def test_a_video_is_dropped_counted_played_and_asked_about_twice(kind, suffix, chromium, site, clips):
    with opened(chromium, site) as tab:
        tab.give(kind, "#chat", clips[suffix])
        until(lambda: f"clip.{suffix} lasts 3.0 s; the model sees 6 frames:" in cost(tab))
        assert cost(tab).endswith("105 video tokens") and tab.page.locator("#cost .strip img").count() == 6
        assert tab.page.locator("#cost .strip img").last.evaluate("image => image.decode().then(() => 1)") == 1
        tab.ask("What moves?")
        tab.finished(1)
        assert tab.notes()[0].endswith("105 video tokens")

        video = tab.page.locator("#chat video")
        assert video.evaluate("video => [video.videoWidth, Math.round(video.duration)]") == [96, 3]
        video.evaluate("video => { video.loop = true; video.isTheSame = true; }")
        tab.page.get_by_label("play-pause-replay-button").click()
        until(lambda: video.evaluate("video => video.currentTime") > 0.2)

        tab.ask("And what else?")
        tab.finished(2)
        assert int(re.search(r"(\d+) of \d+ prompt tokens cached", tab.notes()[1])[1]) > 105
        assert video.evaluate("video => video.isTheSame && !video.paused")  # the answer does not interrupt it


def test_the_cost_follows_the_settings(chromium, site, clips):
    with opened(chromium, site) as tab:
        tab.add(clips["mp4"], SCENE)
        until(lambda: cost(tab).endswith("42 picture tokens and 105 video tokens"))
        tab.page.get_by_role("button", name="Settings").click()
        tab.set_slider("Frames per second of a video", 4)
        until(lambda: "the model sees 12 frames, some of which are:" in cost(tab))
        assert cost(tab).endswith("42 picture tokens and 210 video tokens")
        tab.ask("What moves?")
        tab.finished(1)
        assert tab.notes()[0].endswith("42 picture tokens and 210 video tokens")


def test_what_a_browser_cannot_play_is_shown_as_frames(chromium, site, clips):
    with opened(chromium, site) as tab:
        tab.answer_to("What moves?", clips["avi"])
        strip = tab.page.locator("#chat .unplayable .strip img")
        until(lambda: strip.count() == 6)
        assert strip.last.is_visible() and not tab.page.locator("#chat video").is_visible()
        tab.ask("And what else?")
        tab.finished(2)
        assert strip.count() == 6
        tab.reload()
        until(lambda: strip.count() == 6 and len(tab.answers()) == 2)


def test_a_conversation_with_a_video_is_kept_and_its_loss_is_told(chromium, site, clips):
    with opened(chromium, site) as tab:
        tab.answer_to("What moves?", clips["webm"], SCENE)
        kept = tab.page.locator("#conversations .open")
        until(lambda: kept.count() == 1)
        tab.reload()
        until(lambda: len(tab.answers()) == 1)
        tab.ask("And what else?")
        tab.finished(2)
        tab.page.locator("#conversations summary").click()
        assert kept.locator("img").evaluate("image => image.decode().then(() => 1)") == 1
        tab.leave()
        for path in uploaded():
            shutil.rmtree(path.parent)
        tab.page.goto(site.url)
        tab.page.get_by_text("The videos of this conversation are no longer here").wait_for()
        until(lambda: len(tab.answers()) == 2)
        assert tab.page.locator("#chat video").count() == 0 and tab.page.locator("#chat .component img").count() == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_the_strip_fits_every_width(width, chromium, site, clips):
    with opened(chromium, site, viewport={"width": width, "height": 844}) as tab:
        tab.answer_to("What moves?", clips["avi"])
        tab.add(clips["webm"])
        until(lambda: cost(tab).endswith("105 video tokens"))
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        strip = tab.page.locator("#cost .strip").bounding_box()
        assert strip["x"] + strip["width"] <= width
