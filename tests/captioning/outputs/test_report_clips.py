"""Clips in the report: strips of frames, their place in the video, and links that play it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvllm.captioning.outputs.report import write_report
from tests.helpers.captioning.finding import make_tar
from tests.helpers.captioning.reports import opened, page, pixels, record
from tests.helpers.media.videos import declare_seconds, make_clip

CLIP = {"duration": 10.0, "num_frames": 8, "fps": 2.0, "width": 96, "height": 64}


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    """Ten seconds of grey, which becomes lighter every second."""
    shades = np.repeat(np.arange(20, 220, 20, dtype=np.uint8), 8)
    frames = np.broadcast_to(shades[:, None, None, None], (80, 64, 96, 3))
    return make_clip(tmp_path_factory.mktemp("video") / "grey.mp4", frames=frames)


def clip(path: Path | str, start: float = 0.0, end: float | None = 10.0, **keys) -> dict:
    return record(path, **CLIP, start=start, end=end, **keys)


def shades(strip: np.ndarray) -> list[int]:
    """The grey of the middles of its four frames."""
    return [int(part[:, part.shape[1] // 2].mean()) for part in np.array_split(strip, 4, axis=1)]


def test_a_clip_has_a_strip_of_its_frames(video, tmp_path):
    shown = page(tmp_path / "report.html", [clip(video), clip(video, 5.0, 7.0)])
    whole, part = map(pixels, shown.thumbnails)
    assert whole.shape == (64, 4 * 96 + 6, 3)
    assert shades(whole) == pytest.approx([40, 80, 140, 180], abs=8)
    assert shades(part) == pytest.approx([120, 120, 140, 140], abs=8)
    assert "2 clips: 2 captioned, 0 failed; 0 duplicates." in "".join(shown.all("p"))
    assert [card["start"] for card in shown.records] == [0.0, 5.0]


def test_a_strip_repeats_no_warning(tmp_path, caplog):
    path = make_clip(tmp_path / "a.mkv", 24)
    path.write_bytes(declare_seconds(path.read_bytes(), 60))
    assert page(tmp_path / "report.html", [clip(path, end=3.0)]).thumbnails[0] is not None
    assert not caplog.messages


def test_strips_are_small(tmp_path):
    make_clip(tmp_path / "tall.mp4", 8, size=(640, 360))
    shown = page(tmp_path / "report.html", [record(tmp_path / "tall.mp4", start=0.0, end=1.0)])
    assert pixels(shown.thumbnails[0]).shape == (128, 4 * 72 + 6, 3)
    assert len(shown.thumbnails[0]) < 30_000


def test_images_and_clips_are_told_apart(video, tmp_path, colors):
    tar = make_tar(tmp_path / "shard.tar", {"a.mp4": video.read_bytes()})
    records = [
        record(colors[0]),
        clip(f"{tar}/a.mp4"),
        clip(tmp_path / "gone.mp4", end=None, caption=None, error="no such file"),
        clip(video, 5.0, 7.0),
        clip("copy.mp4", 5.0, 7.0, duplicate_of=str(video)),
        clip(colors[0], caption=None, error="is no video"),
    ]
    shown = page(tmp_path / "report.html", records)
    assert "1 image and 5 clips: 4 captioned, 2 failed; 1 duplicate." in "".join(shown.all("p"))
    sizes = [None if thumbnail is None else pixels(thumbnail).shape[:2] for thumbnail in shown.thumbnails]
    assert sizes[:5] == [(40, 60), (64, 390), None, (64, 390), None]
    assert shown.records[4]["same"] == 3


@pytest.mark.browser
def test_cards_of_clips_show_frames_and_place_and_play_the_part(chromium, video, tmp_path):
    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    records = [
        record(tmp_path / "red.png"),
        clip(video),
        clip(video, 5.0, 7.5),
        clip("copy.mp4", 5.0, 7.5, duplicate_of=str(video)),
        clip("gone.mp4", 0.0, None, caption=None, error="no such file"),
    ]
    write_report(tmp_path / "report.html", records, {})
    with opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900}) as tab:
        names = tab.locator(".card .name").all_text_contents()
        assert names == [
            "red.png",
            "grey.mp4 0:00\u20130:10",
            "grey.mp4 0:05\u20130:07.5",
            "copy.mp4 0:05\u20130:07.5",
            "gone.mp4",
        ]
        links = [link.get_attribute("href") for link in tab.locator("a.thumbnail").all()]
        assert links[1:] == [video.as_uri(), f"{video.as_uri()}#t=5,7.5"]
        assert tab.locator(".duplicate").all_text_contents() == ["Same clip as grey.mp4"]
        small = tab.locator(".card .small").nth(2).text_content().replace("\u00a0", " ")
        assert small.startswith("of 0:10 · 8 frames · 96 \u00d7 64")
        image, strip = (tab.locator(".card").nth(i).bounding_box()["width"] for i in (0, 1))
        assert strip > 1.9 * image
        widths = [tab.locator("img").nth(i).bounding_box()["width"] for i in (1, 2, 3)]
        assert min(widths) > 300


@pytest.mark.browser
def test_clips_fit_a_phone(chromium, video, tmp_path):
    write_report(tmp_path / "report.html", [clip(video), clip(video, 5.0, 7.0)], {})
    with opened(chromium, tmp_path / "report.html", viewport={"width": 360, "height": 700}) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.locator("img").first.bounding_box()["width"] > 250
