"""Conversations on the page in a real browser."""

import re

import pytest

from mmvllm import LLM
from mmvllm.demo import session as session_module
from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.engine.requests import ask
from tests.helpers.serving.browser import OTHER, SCENE, is_ending, opened, uploaded
from tests.helpers.serving.pages import Site, elsewhere, in_steps, until
from tests.helpers.serving.server import serving

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]


@pytest.fixture(scope="module")
def offline():
    llm = LLM(None, dtype="float32", device="cpu", num_kvcache_blocks=256, skip_warmup=True)
    yield llm
    llm.exit()


def test_the_answer_equals_the_offline_one_and_the_next_uses_the_caches(chromium, site, offline):
    with opened(chromium, site) as tab:
        want = offline.generate_multimodal([ask(SCENE, "Describe this image.")], use_tqdm=False)[0]
        assert tab.answer_to("Describe this image.", SCENE) == want.text
        assert re.fullmatch(
            rf"First token after \d+\.\d\d s · \d+ tokens/s · 0 of {want.num_prompt_tokens} prompt tokens cached"
            rf" · {want.num_image_tokens} picture tokens",
            tab.notes()[0],
        )
        assert tab.answer_to("What is written?") == '"4".'
        cached = int(re.search(r"(\d+) of \d+ prompt tokens cached", tab.notes()[1])[1])
        assert cached > want.num_image_tokens
        tab.page.get_by_role("button", name="Last answers").click()
        tab.page.locator("#gallery .caption-label").nth(1).wait_for()
        assert tab.page.locator("#gallery .caption-label").all_inner_texts() == [
            'What is written? "4".',
            f"Describe this image. {want.text}",
        ]


def test_the_tokens_of_images_are_shown_before_asking_and_follow_the_resolution(chromium, site):
    with opened(chromium, site) as tab:
        cost = tab.page.locator("#cost")
        pictures, videos = "3 pictures of 488 KiB and 64 million pixels", "2 videos of 488 KiB and 60 minutes"
        assert cost.inner_text() == f"Up to {pictures}, and {videos}"
        tab.add(SCENE, OTHER)
        until(lambda: cost.inner_text() == "42 + 42 = 84 picture tokens")
        tab.page.get_by_role("button", name="Settings").click()
        for label, pixels in (("Most", 10_000), ("Fewest", 9_000)):
            tab.set_slider(f"{label} pixels of a picture or frame", pixels)
        until(lambda: cost.inner_text() == "9 + 9 = 18 picture tokens")
        tab.ask("Describe this image.")
        tab.finished(1)
        assert tab.notes()[0].endswith("9 + 9 = 18 picture tokens")


def test_the_tokens_of_an_image_are_hidden_once_the_question_is_sent(chromium, site):
    with opened(chromium, site) as tab:
        tab.add(SCENE)
        cost = tab.page.locator("#cost")
        until(lambda: cost.inner_text() == "42 picture tokens")
        tab.box.press("Enter")  # without text, whose change would be another event
        until(lambda: cost.inner_text().startswith("Up to 3 pictures"))
        tab.finished(1)


def test_an_example_is_asked_with_one_click(chromium, site):
    with opened(chromium, site) as tab:
        tab.page.locator("#chat .example").nth(1).click()
        assert tab.finished(1) == "Green."
        assert tab.questions() == ["What color is the star?"]
        assert tab.page.locator("#chat .component img").evaluate("image => image.decode().then(() => 1)") == 1


def test_retry_edit_undo_and_clear(chromium, site):
    with opened(chromium, site) as tab:
        tab.answer_to("How many shapes are there?", OTHER, SCENE)
        tab.answer_to("What is written?")
        num_finished = site.engine.stats().num_finished
        tab.button("Retry").click()
        until(lambda: site.engine.stats().num_finished > num_finished)  # before that, the old answer may still be shown
        tab.finished(2)
        assert tab.questions() == ["How many shapes are there?", "What is written?"]

        tab.page.locator('#chat button[aria-label="Edit"]:visible').first.click()
        tab.page.locator("#chat textarea").fill("Describe this image.")
        tab.button("Submit").click()
        until(lambda: tab.questions() == ["Describe this image."])
        assert tab.finished(1).startswith("A ")

        tab.button("Undo").click()
        until(lambda: tab.box.input_value() == "Describe this image.")
        assert (tab.questions(), tab.page.locator("#box .thumbnail-item").count()) == ([], 2)

        tab.box.press("Enter")
        tab.finished(1)
        tab.button("Clear").click()
        tab.page.locator("#chat .example").first.wait_for()
        assert tab.answer_to("What is written?", SCENE) == '"4".'
        assert len(tab.questions()) == 1


def test_two_tabs_are_served_concurrently_and_independently(chromium, chatty_site):
    with opened(chromium, chatty_site) as one, opened(chromium, chatty_site) as two:
        for tab, path in ((one, SCENE), (two, OTHER)):
            tab.set_longest(900)
            tab.add(path)
        with in_steps(chatty_site.engine) as make_steps:
            one.ask("first")
            until(lambda: one.notes() == ["Waiting, next in line"])
            two.ask("second")
            until(lambda: two.notes() == ["Waiting, 1 ahead of you"])
            make_steps(40)
            until(lambda: any(one.answers()) and any(two.answers()))
            assert chatty_site.engine.stats().num_running == 2
            before = one.answers()[0]
            make_steps(40)
            until(lambda: len(one.answers()[0]) > len(before))  # it streams
            assert (one.questions(), two.questions()) == (["first"], ["second"])
        assert one.finished(1) != two.finished(1)


def test_stop_aborts_the_request_within_a_step(chromium, chatty_site):
    engine = chatty_site.engine
    with in_steps(engine) as make_steps, opened(chromium, chatty_site) as tab:
        tab.set_longest(900)
        tab.ask("talk")
        make_steps(60)
        until(lambda: tab.answers() and len(tab.answers()[0]) > 20)
        tab.page.locator("#box .stop-button").click()
        until(lambda: is_ending(engine))
        make_steps(1)
        until(lambda: engine.stats().num_running == 0)
        until(lambda: tab.notes()[0].startswith("Stopped · first token after"))
        tab.page.locator("#box .submit-button").wait_for()
        assert len(tab.answers()[0]) > 20
        tab.ask("again")
        make_steps(5)
        until(lambda: engine.stats().num_running == 1)


def test_a_closed_tab_aborts_its_request_and_removes_its_images(chromium, chatty_site, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0.5)
    engine = chatty_site.engine
    with opened(chromium, chatty_site) as stays, opened(chromium, chatty_site) as leaves:
        stays.add(SCENE)
        leaves.add(SCENE, OTHER)
        leaves.set_longest(900)
        with in_steps(engine) as make_steps:
            leaves.ask("talk")
            make_steps(5)
            until(lambda: engine.stats().num_running == 1)
            leaves.page.close()
            until(lambda: is_ending(engine))
            make_steps(1)
            until(lambda: engine.stats().num_running == 0)
        until(lambda: [path.name for path in uploaded()] == [SCENE.name])  # held by the other tab too
        assert stays.answer_to("here?").strip()
    until(lambda: uploaded() == [])


def test_a_photo_is_taken(chromium, site):
    with opened(chromium, site, permissions=["camera"]) as tab:
        tab.page.get_by_role("button", name="Camera").click()
        tab.page.locator("#camera").get_by_role("button").first.click()
        until(lambda: tab.page.locator("#camera video").evaluate("video => video.currentTime") > 0.2)
        tab.page.get_by_label("capture photo").click()
        until(lambda: tab.page.locator("#cost").inner_text() == "48 picture tokens")
        tab.ask("Describe this image.")
        assert tab.finished(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_every_width_in_light_and_dark(scheme, width, chromium, site):
    with opened(chromium, site, viewport={"width": width, "height": 800}, color_scheme=scheme) as tab:
        tab.answer_to("Describe this image. " + "unbroken" * 30, SCENE, OTHER)
        tab.page.get_by_role("button", name="Settings").click()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate("document.querySelector('#chat .bubble-wrap').scrollWidth") <= width
        colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", colour)[:3])) < 60) == (scheme == "dark")


@pytest.fixture
def mounted():
    """The page as `mmvllm serve --demo` mounts it."""
    engine = AsyncLLM(None, dtype="float32", device="cpu", num_kvcache_blocks=256, skip_warmup=True)
    with serving(engine, demo=True) as running:
        yield Site(f"{running.url}/demo/", engine)
    elsewhere(engine.shutdown(drain=False))


def test_the_page_works_when_mounted_by_the_server(chromium, mounted, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0.5)
    with opened(chromium, mounted) as tab:
        assert tab.page.locator("#cost").inner_text().startswith("Up to 16 pictures of 20 MiB")
        assert tab.answer_to("What is written?", SCENE) == '"4".'
        assert tab.answer_to("Describe this image.")
        assert uploaded()
        tab.reload()
        until(lambda: tab.questions() == ["What is written?", "Describe this image."])
    until(lambda: uploaded() == [])
