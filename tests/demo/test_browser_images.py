"""Adding and enlarging images, questions as they were typed, and use by touch, keyboard and screen reader."""

import pytest

from tests.helpers.serving.browser import OTHER, SCENE, opened
from tests.helpers.serving.pages import until

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
UNNAMED = """() => [...document.querySelectorAll("button, textarea, summary, input:not([type=file])")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.getAttribute("aria-label") || element.innerText.trim() || element.labels?.length))
  .map((element) => element.outerHTML)"""
SMALL = """() => [...document.querySelectorAll("#chat button, #box button, #photo, #conversations button")]
  .filter((element) => element.checkVisibility())
  .map((element) => [element.getAttribute("aria-label"), element.getBoundingClientRect()])
  .filter(([_, box]) => box.width < 32 || box.height < 32)
  .map(([label, box]) => `${label} ${box.width}x${box.height}`)"""


@pytest.mark.parametrize("kind, target", [("drop", "#chat"), ("drop", "#heading"), ("paste", "#chat")])
def test_an_image_is_added_wherever_it_is_dropped_or_pasted(kind, target, chromium, site):
    with opened(chromium, site) as tab:
        assert tab.give(kind, target, SCENE) or kind == "paste"
        until(lambda: tab.page.locator("#cost").inner_text() == "42 picture tokens")
        tab.ask("What is written?")
        assert tab.finished(1) == '"4".'


def test_an_image_of_the_conversation_is_enlarged_by_click_and_key(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("What is written?", SCENE)
        small, large = tab.page.get_by_role("button", name=f"Enlarge {SCENE.name}"), tab.page.locator("#enlarged img")
        for enlarge in (small.click, lambda: small.press("Enter")):
            enlarge()
            large.wait_for()
            assert large.bounding_box()["height"] > 2 * small.bounding_box()["height"]
            tab.page.keyboard.press("Escape")
            large.wait_for(state="detached")


def test_a_question_is_shown_and_edited_as_it_was_typed(chromium, site):
    typed = "<img alt=no onerror=alert(1)> <h1>What</h1> is *written*, **2*3** and `x`? <b>no</b> $y$ _z_\n"
    typed += "# - 1. &amp; \\* <br>"
    with opened(chromium, site) as tab:
        tab.answer_to(typed, SCENE)
        assert tab.questions() == [typed]
        tab.page.locator('#chat button[aria-label="Edit"]:visible').first.click()
        edited = tab.page.locator("#chat textarea")
        assert edited.input_value() == typed
        edited.press("Escape")
        edited.wait_for(state="detached")
        tab.page.locator('#chat button[aria-label="Edit"]:visible').first.click()
        edited.fill("What is *written*?")
        edited.press("Shift+Enter")
        assert edited.input_value() == "What is *written*?\n"
        edited.press("Enter")
        until(lambda: [question.strip() for question in tab.questions()] == ["What is *written*?"])
        tab.finished(1)


def test_all_controls_have_names(chromium, site):
    with opened(chromium, site) as tab:
        assert tab.page.evaluate(UNNAMED) == []
        tab.answer_to("What is written?", SCENE)
        tab.add(OTHER)
        tab.page.locator("#conversations summary").click()
        tab.page.locator('#chat button[aria-label="Edit"]:visible').first.click()
        tab.page.get_by_label("Edit the question").wait_for()
        until(lambda: tab.page.evaluate(UNNAMED) == [])
        tab.page.get_by_role("button", name="Remove picture").click()
        until(lambda: tab.page.locator("#box .thumbnail-item").count() == 0)


def test_buttons_are_large_enough_for_fingers(chromium, site):
    with opened(chromium, site, **PHONE) as tab:
        tab.answer_to("What is written?", SCENE)
        tab.page.locator("#conversations summary").click()
        tab.add(OTHER)
        assert tab.page.evaluate(SMALL) == []


def test_a_phone_takes_a_photo_with_its_own_camera(chromium, site):
    with opened(chromium, site, **PHONE) as tab:
        with tab.page.expect_file_chooser() as chooser:
            tab.page.get_by_role("button", name="Camera").click()
        assert chooser.value.element.get_attribute("capture") == "environment"
        chooser.value.set_files(str(SCENE))
        until(lambda: tab.page.locator("#cost").inner_text() == "42 picture tokens")


@pytest.mark.parametrize("size", [(1280, 800), (1280, 1200), (390, 844)])
def test_the_chat_fills_the_height_of_the_window(size, chromium, site):
    width, height = size
    with opened(chromium, site, viewport={"width": width, "height": height}) as tab:
        tab.page.locator("#chat .example").first.wait_for()
        assert tab.page.evaluate("document.documentElement.scrollHeight") == height
        below = tab.page.locator("#folded").bounding_box()
        assert height - (below["y"] + below["height"]) < 32
        assert tab.page.locator("#chat").bounding_box()["height"] > 0.3 * height
