"""Conversations are kept in the browser: they survive a reload, and are listed, saved and deleted."""

import base64
import json
import shutil

import pytest

from mmvllm.demo.uploads import process_uploads
from tests.helpers.serving.browser import OTHER, SCENE, opened, uploaded
from tests.helpers.serving.pages import until

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]
STORED = "() => Object.keys(localStorage).filter((key) => key.startsWith('mmvllm.'))"


def kept(tab) -> list[str]:
    return tab.page.locator("#conversations .open span").all_text_contents()


def stored(tab) -> list[str]:
    return tab.page.evaluate(STORED)


def unfold(tab) -> None:
    tab.page.locator("#conversations summary").click()


def saved(tab, label: str) -> str:
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=label).click()
    return download.value.path().read_text(encoding="utf-8")


def test_a_conversation_survives_a_reload_and_goes_on(chromium, site):
    with opened(chromium, site) as tab:
        answer = tab.answer_to("Describe this image.", SCENE)
        until(lambda: kept(tab) == ["Describe this image."])
        tab.reload()
        until(lambda: tab.answers() == [answer])
        assert tab.questions() == ["Describe this image."] and "tokens cached" in tab.notes()[0]
        assert tab.page.locator("#chat .component img").evaluate("image => image.decode().then(() => 1)") == 1
        tab.ask("What is written?")
        assert tab.finished(2) == '"4".'


def test_a_conversation_is_resumed_with_copies_if_the_server_has_forgotten_its_images(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("Describe this image.", SCENE)
        until(lambda: kept(tab) == ["Describe this image."])
        tab.leave()
        for path in uploaded():
            shutil.rmtree(path.parent)
        assert not uploaded() and process_uploads().folder.exists()
        tab.page.goto(site.url)
        tab.page.get_by_text("small copies that your browser has kept").wait_for()
        until(lambda: len(tab.answers()) == 1)
        tab.ask("What is written?")
        assert tab.finished(2) == '"4".'


def test_past_conversations_are_listed_opened_and_deleted(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("What is written?", SCENE)
        until(lambda: kept(tab) == ["What is written?"])
        unfold(tab)
        tab.page.get_by_role("button", name="New conversation").click()
        tab.page.locator("#chat .example").first.wait_for()
        tab.answer_to("Describe this image.", OTHER)
        until(lambda: kept(tab) == ["Describe this image.", "What is written?"])
        tab.page.locator("#conversations .open").nth(1).click()
        until(lambda: tab.answers() == ['"4".'])
        tab.page.get_by_role("button", name="Delete Describe this image.").click()
        until(lambda: kept(tab) == ["What is written?"])
        assert tab.answers() == ['"4".']
        tab.button("Clear").click()
        until(lambda: kept(tab) == [] and stored(tab) == [])


def test_all_conversations_are_forgotten_at_once(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("What is written?", SCENE)
        until(lambda: kept(tab) == ["What is written?"])
        unfold(tab)
        tab.page.on("dialog", lambda dialog: dialog.accept())
        tab.page.get_by_role("button", name="Forget all").click()
        tab.page.locator("#chat .example").first.wait_for()
        until(lambda: (kept(tab), stored(tab)) == ([], []))
        tab.reload()
        tab.page.locator("#chat .example").first.wait_for()
        assert tab.answers() == []


def test_a_conversation_is_saved_as_markdown_and_json(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("What is **written**?", SCENE)
        until(lambda: kept(tab) == ["What is **written**?"])
        unfold(tab)
        content = json.loads(saved(tab, "Save as JSON"))
        (turn,) = content["turns"]
        assert (content["model"], turn["question"]) == ("mmvllm's bundled demonstration model", "What is **written**?")
        assert turn["answer"] and turn["images"][0]["name"] == SCENE.name
        assert base64.b64decode(turn["images"][0]["data"].partition(",")[2]) == SCENE.read_bytes()
        text = saved(tab, "Save as Markdown")
        assert "**Question:** What is \\*\\*written\\*\\*?" in text and turn["answer"] in text
        assert f"![{SCENE.name}][1]" in text and "[1]: data:image/png;base64," in text


def test_the_number_of_kept_conversations_is_limited(chromium, site):
    with opened(chromium, site) as tab:
        turns = [{"question": "old", "answer": "a", "note": "", "images": []}]
        for i in range(25):
            value = json.dumps({"saved": i, "turns": turns, "copies": {"x": "y" * 250_000 if i > 20 else ""}})
            tab.page.evaluate("([i, value]) => localStorage.setItem('mmvllm.conversation.' + i, value)", [i, value])
        tab.answer_to("What is written?", SCENE)
        until(lambda: "What is written?" in kept(tab))
        assert len(kept(tab)) == 20
        assert "mmvllm.conversation.24" in stored(tab) and "mmvllm.conversation.5" not in stored(tab)
