"""The images that glob patterns, single files and URLs name."""

from pathlib import Path

import pytest

from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item
from tests.helpers.captioning.finding import put, relatives


@pytest.fixture
def album(tmp_path, monkeypatch) -> Path:
    put(
        tmp_path, "a.png", "b.jpg", "notes.txt", "2019/a.png", "2019/May/c.png", "2020/a.png", ".git/a.png", "[x]/d.png"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("*.png", ["a.png"]),
        ("?.*", ["a.png", "b.jpg"]),
        ("[ab].png", ["a.png"]),
        ("20*", ["2019/May/c.png", "2019/a.png", "2020/a.png"]),
        ("20*/", ["2019/May/c.png", "2019/a.png", "2020/a.png"]),
        ("*/", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png"]),
        ("*/a.png", ["2019/a.png", "2020/a.png"]),
        ("20[12][0-8]/*", ["2020/a.png"]),
        ("2019/**", ["May/c.png", "a.png"]),
        ("2019/**/", ["May/c.png", "a.png"]),
        ("2019/*/**", ["May/c.png"]),
        ("*/**", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png"]),
        ("2019/**/c.png", ["May/c.png"]),
        ("**/May", ["2019/May/c.png"]),
        ("**/May/**/*.png", ["2019/May/c.png"]),
        ("**/**/a.png", ["2019/a.png", "2020/a.png", "a.png"]),
        ("**", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png", "a.png", "b.jpg"]),
        (".g*/a.png", [".git/a.png"]),
        ("[[]x]/*", ["[x]/d.png"]),
        ("*.txt", []),
    ],
)
def test_pattern_matches_have_the_same_relative_paths_as_in_a_folder(pattern, want, album):
    assert relatives(pattern) == want
    # For an absolute pattern, relative paths begin after the part without magic characters.
    assert relatives(f"{album}/{pattern}") == want


@pytest.mark.parametrize("pattern", ["*.gif", "*/b.jpg", "none/*", "none/**", "a.png/*", "**/[y]"])
def test_a_pattern_without_a_match_is_an_error(pattern, album):
    (item,) = find_items([pattern])
    assert (item.path, item.source, item.error) == (pattern, None, "nothing matches this pattern")


def test_pattern_matches_keep_the_form_of_the_given_path(album):
    assert [item.path for item in find_items(["2*/a.png", f"{album}/2*/a.png"])] == [
        "2019/a.png",
        "2020/a.png",
        f"{album}/2019/a.png",
        f"{album}/2020/a.png",
    ]


def test_an_existing_path_with_magic_characters_is_not_a_pattern(album):
    put(album, "a[1].png", "what?", "*/x.png")
    assert relatives("a[1].png", "what?", "*") == ["a[1].png", "what?", "*/x.png"]
    assert relatives("[x]") == ["d.png"]


def test_a_pattern_opens_only_folders_that_can_match(album, open_folders):
    assert relatives("*/May/*.png") == ["2019/May/c.png"]
    assert len(open_folders[1]) == 5  # the album, three folders and May


@pytest.mark.parametrize(
    ("path", "relative"),
    [
        ("a.png", "a.png"),
        ("~/a.png", "a.png"),
        ("s3://bucket/a.png", "a.png"),
        ("https://x.org/a/b.png?size=1&name=c.gif", "x.org/a/b.png"),
        ("HTTP://user:word@x.org:8080/a.png#top", "x.org/a.png"),
        ("https://x.org", "x.org/index"),
        ("https://x.org/?q=1", "x.org/index"),
        ("https://x.org/../..//a/./b.png", "x.org/a/b.png"),
        ("https://../a.png", "a.png"),
        ("http:///a.png", "a.png"),
        ("http://[::1]:80/a.png", "[::1]/a.png"),
        ("http://[::1/a.png", "[/a.png"),
        ("http://x.org/what*[is]?.png", "x.org/what*[is]"),
        ("a\0b.png", "ab.png"),
    ],
)
def test_other_paths_are_files_or_urls(path, relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(find_items([path])) == [Item(path, relative, path)]


@pytest.mark.parametrize("path", ["no/such/a.weird", "../a", "no/..", ""])
def test_a_missing_path_is_refused_before_the_search(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        find_items([path])


def test_files_keep_their_order_and_may_have_any_suffix(tmp_path):
    put(tmp_path, "b.png", "a.bin")
    assert relatives(tmp_path / "b.png", tmp_path / "a.bin", tmp_path / "b.png") == ["b.png", "a.bin", "b.png"]
