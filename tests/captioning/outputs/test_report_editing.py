"""The report in a browser: the order of images, edited captions, and the download of the records."""

import json
from pathlib import Path

import pytest

from mmvllm.captioning.outputs.record import as_line
from mmvllm.captioning.outputs.report import write_report
from tests.helpers.captioning.reports import HOSTILE, opened, page, record

pytestmark = pytest.mark.browser


def names(tab) -> list[str]:
    return tab.locator(".card .name").all_text_contents()


def edit(tab, name: str, words: str, end: str = "Control+Enter") -> None:
    tab.get_by_role("button", name=f"Edit the caption of {name}").click()
    tab.get_by_role("textbox", name=f"Caption of {name}").fill(words)
    tab.keyboard.press(end)


def downloaded(tab) -> list[str]:
    """The lines of the download."""
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Download JSONL").click()
    assert download.value.suggested_filename == "captions-edited.jsonl"
    text = Path(download.value.path()).read_bytes().decode()
    assert text.endswith("\n") or text == ""
    return text.split("\n")[:-1]


RECORDS = [
    record("b/img10.png", caption="four", completion_tokens=3, time=1.8e9 + 2),
    record("a/img9.png", caption="the longest one", completion_tokens=9, time=1.8e9 + 1),
    record("gone.png", caption=None, error="no such file", completion_tokens=0, time=1.8e9 + 3),
    record("c/img1.png", caption="seven!!", completion_tokens=5, time=None),
]


@pytest.fixture
def report(tmp_path) -> Path:
    write_report(tmp_path / "report.html", RECORDS, {"Model": "a model"})
    return tmp_path / "report.html"


@pytest.mark.parametrize(
    ("order", "want"),
    [
        ("found", ["img10.png", "img9.png", "gone.png", "img1.png"]),
        ("name", ["gone.png", "img1.png", "img9.png", "img10.png"]),
        ("time", ["gone.png", "img10.png", "img9.png", "img1.png"]),
        ("length", ["img9.png", "img1.png", "img10.png", "gone.png"]),
        ("tokens", ["img9.png", "img1.png", "img10.png", "gone.png"]),
        ("failed", ["gone.png", "img10.png", "img9.png", "img1.png"]),
    ],
)
def test_the_images_are_sorted(order, want, chromium, report):
    with opened(chromium, report) as tab:
        tab.get_by_label("Sort by").select_option(order)
        assert names(tab) == want
        tab.get_by_role("button", name="Reverse").press("Enter")
        assert names(tab) == want[::-1]
        assert tab.get_by_role("button", name="Reverse").get_attribute("aria-pressed") == "true"
        tab.get_by_label("Search").fill("img")
        assert names(tab) == [name for name in want[::-1] if name != "gone.png"]


def test_a_caption_is_edited_with_the_keyboard_alone(chromium, report):
    with opened(chromium, report) as tab:
        tab.get_by_role("button", name="Edit the caption of img9.png").press("Enter")
        assert tab.evaluate("document.activeElement.ariaLabel") == "Caption of img9.png"
        tab.keyboard.press("Control+A")
        tab.keyboard.type("my words")
        tab.keyboard.press("Tab")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.ariaLabel") == "Finish the caption of img9.png"
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.ariaLabel") == "Edit the caption of img9.png"
        assert tab.locator(".caption").all_text_contents() == ["four", "my words", "seven!!"]
        assert tab.locator("#edits").text_content() == "1 edited" and tab.locator(".card.edited").count() == 1
        tab.get_by_label("Search").fill("my words")
        assert names(tab) == ["img9.png"]
        tab.get_by_label("Search").fill("longest")
        assert names(tab) == []


def test_changes_are_taken_back(chromium, report):
    with opened(chromium, report) as tab:
        edit(tab, "img9.png", "first")
        edit(tab, "img9.png", "second", end="Escape")
        assert tab.locator(".caption").nth(1).text_content() == "first"
        tab.get_by_role("button", name="Restore the caption of img9.png").click()
        assert tab.locator(".caption").nth(1).text_content() == "the longest one"
        assert tab.locator("#edits").text_content() == "" and tab.locator(".edited").count() == 0
        assert downloaded(tab) == [as_line(each) for each in RECORDS]


def test_what_is_typed_is_kept_when_the_cards_are_rebuilt(chromium, report):
    with opened(chromium, report) as tab:
        tab.get_by_role("button", name="Edit the caption of img1.png").click()
        tab.get_by_role("textbox", name="Caption of img1.png").fill("not finished")
        tab.get_by_label("Sort by").select_option("edited")
        assert tab.locator(".caption").all_text_contents() == ["not finished", "four", "the longest one"]


def test_a_failure_has_no_caption_to_edit(chromium, report):
    with opened(chromium, report) as tab:
        assert tab.get_by_role("button", name="Edit the caption of").count() == 3
        assert tab.get_by_role("button", name="gone.png").count() == 0


def test_the_download_has_all_records_and_marks_those_with_another_caption(chromium, report):
    words = 'two lines,\n"quoted" </script> 日本 🦊 \\'
    with opened(chromium, report) as tab:
        edit(tab, "img10.png", words)
        edit(tab, "img9.png", "")
        tab.get_by_label("Search").fill("img1.png")  # what is shown does not matter
        lines = downloaded(tab)
    assert lines[2:] == [as_line(each) for each in RECORDS[2:]]
    changed = [json.loads(line) for line in lines[:2]]
    assert changed == [
        {**RECORDS[0], "caption": words, "edited": True},
        {**RECORDS[1], "caption": "", "edited": True},
    ]
    assert list(changed[0]) == [*RECORDS[0], "edited"]


def test_hostile_captions_are_edited_and_downloaded_as_text(chromium, tmp_path):
    records = [record(f"{i}.png", caption=text, id=text) for i, text in enumerate(HOSTILE)]
    shown = page(tmp_path / "report.html", records)
    assert shown.lines == [as_line(each) for each in records]
    with opened(chromium, tmp_path / "report.html") as tab:
        assert downloaded(tab) == [as_line(each) for each in records]
        for i, text in enumerate(HOSTILE):
            typed = text.replace("\r", "\n").encode("utf-8", "backslashreplace").decode()
            edit(tab, f"{i}.png", f"{typed}!")
            assert tab.locator(".caption").nth(i).text_content() == f"{typed}!"
        made = [json.loads(line) for line in downloaded(tab)]
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("script:not([type])").count() == 1 and tab.locator("img").count() == 0
    assert [each["id"] for each in made] == HOSTILE and all(each["edited"] for each in made)


def test_leaving_with_changes_that_were_not_downloaded_asks_first(chromium, report):
    context = chromium.new_context()
    for is_saved in (False, True):
        tab, dialogs = context.new_page(), []
        tab.on("dialog", lambda dialog, dialogs=dialogs: (dialogs.append(dialog.type), dialog.accept()))
        tab.goto(report.as_uri())
        edit(tab, "img9.png", "changed")
        if is_saved:
            downloaded(tab)
        tab.reload()
        assert dialogs == ([] if is_saved else ["beforeunload"])
    context.close()


def test_ten_thousand_captions_are_sorted_edited_and_downloaded_in_seconds(chromium, tmp_path):
    records = [record(f"folder/{i}.png", caption=f"number {i} " + "word " * 30) for i in range(10_000)]
    write_report(tmp_path / "report.html", records, {})
    with opened(chromium, tmp_path / "report.html") as tab:
        tab.set_default_timeout(10_000)
        tab.get_by_label("Sort by").select_option("name")
        tab.get_by_role("button", name="Reverse").click()
        edit(tab, "9999.png", "the last")
        assert tab.locator(".card").count() < 1000
        lines = downloaded(tab)
    assert len(lines) == 10_000 and lines[:-1] == [as_line(each) for each in records[:-1]]
    assert json.loads(lines[-1])["caption"] == "the last"
