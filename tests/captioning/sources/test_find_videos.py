"""Videos are found where images are, by their suffix or as lists name them."""

import pytest

from mmvllm.captioning.sources import tars
from mmvllm.captioning.sources.counts import Counts
from mmvllm.captioning.sources.find import find_items
from tests.helpers.captioning.finding import make_tar, put


def found(*paths) -> dict[str, bool]:
    """Relative path of each item -> whether it is a video."""
    items = list(find_items(list(map(str, paths))))
    assert [item.error for item in items] == [None] * len(items)
    return {item.relative: item.is_video for item in items}


def test_videos_are_found_in_folders_patterns_and_tars(tmp_path):
    folder = put(tmp_path / "media", "a.mp4", "b.PNG", "deep/c.WebM", "d.gif", ".e.mp4", "f.wav")
    ignored = Counts()
    names = [item.relative for item in find_items([folder], ignored)]
    assert names == ["a.mp4", "b.PNG", "d.gif", "deep/c.WebM"] and ignored == {"hidden": 1, ".wav": 1}
    assert found(folder) == {"a.mp4": True, "b.PNG": False, "d.gif": False, "deep/c.WebM": True}
    assert found(folder / "**/*.[mW]*") == {"a.mp4": True, "deep/c.WebM": True}
    assert found(folder / "a.mp4") == {"a.mp4": True}
    tar = make_tar(tmp_path / "s.tar", {"x/a.mkv": b"video", "b.png": b"image", "c.wav": b""})
    assert found(tar) == {"s/x/a.mkv": True, "s/b.png": False}


def test_the_kind_of_a_url_follows_from_its_path():
    assert found("https://example.org/a.mp4?size=9", "http://example.org/v.mp4/b") == {
        "example.org/a.mp4": True,
        "example.org/v.mp4/b": False,
    }


def test_lists_name_videos_and_parts_of_them(tmp_path):
    (tmp_path / "list.txt").write_text("a.mp4\nb.png\ndata:video/mp4;base64,AAAA\ndata:image/png;base64,AAAA\n")
    assert [item.is_video for item in find_items([tmp_path / "list.txt"])] == [True, False, True, False]
    lines = (
        '{"video": "a.bin", "prompt": "Who?"}',
        '{"video": "a.mp4", "start": 3, "end": 4.5}',
        '{"video": "a.mp4", "start": 3, "id": 7}',
        '{"image": "a.mp4"}',
    )
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    items = list(find_items([tmp_path / "list.jsonl"]))
    assert [(item.source, item.is_video, item.start, item.end) for item in items] == [
        ("a.bin", True, None, None),
        ("a.mp4", True, 3.0, 4.5),
        ("a.mp4", True, 3.0, None),
        ("a.mp4", False, None, None),
    ]
    assert [(item.prompt, item.id, item.part) for item in items[:3]] == [
        ("Who?", None, ""),
        (None, None, "3.0-4.5"),
        (None, "7", "3.0-None"),
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"image": "a.png", "video": "a.mp4"}', 'has both "image" and "video"; give one of them'),
        ('{"video": 3}', '"video" must be a string, got 3'),
        ('{"video": ""}', 'has no "image" or "video"; '),
        ('{"video": "a.mp4", "start": "3"}', '"start" must be a number of seconds, got "3"'),
        ('{"video": "a.mp4", "end": true}', '"end" must be a number of seconds, got true'),
        ('{"video": "a.mp4", "start": 5, "end": 5}', '"start" and "end" are seconds with 0 <= start < end'),
        ('{"video": "a.mp4", "start": -1}', '"start" and "end" are seconds with 0 <= start < end'),
        ('{"video": "a.mp4", "end": Infinity}', '"start" and "end" are seconds with 0 <= start < end'),
        ('{"video": "a.mp4", "start": NaN}', '"start" and "end" are seconds with 0 <= start < end'),
        ('{"image": "a.png", "start": 1}', '"start" and "end" go with "video"'),
    ],
)
def test_wrong_lines_are_errors(line, error, tmp_path):
    (tmp_path / "list.jsonl").write_text(line)
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert item.error.startswith(error) and item.source is None


def test_messages_about_videos_in_tars_speak_of_a_video(tmp_path, monkeypatch):
    tar = make_tar(tmp_path / "s.tar", {"a.mp4": b"x" * 700})
    monkeypatch.setattr(tars, "MAX_FILE_BYTES", 699)
    (item,) = find_items([tar])
    with pytest.raises(ValueError, match="the video in it has 700 bytes, more than 699"):
        item.read()
