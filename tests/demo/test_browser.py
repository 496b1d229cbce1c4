"""The page in a real browser, as people use it."""

import os
import re
import socketserver
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.async_llm import AsyncLLM
from mmvllm.demo import uploads as uploads_module
from mmvllm.demo.uploads import process_uploads
from tests.helpers.pages import Site, elsewhere, in_steps, served, until
from tests.helpers.requests import ask, noise_image
from tests.helpers.server import serving

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]

IMAGES = Path(__file__).parents[2] / "examples" / "images"
SCENE, OTHER = IMAGES / "scene-05.png", IMAGES / "scene-10.png"


class Tab:
    """One visitor's tab, in the words of somebody who uses it."""

    def __init__(self, page):
        self.page = page
        self.box = page.locator("#box textarea")
        self.box.wait_for()

    def add(self, *paths: Path) -> None:
        self.page.locator("#box input[type=file]").set_input_files([str(path) for path in paths])
        self.page.locator("#box .thumbnail-item").nth(len(paths) - 1).wait_for()

    def ask(self, question: str) -> None:
        self.box.fill(question)
        self.box.press("Enter")

    def told(self, question: str, *paths: Path) -> str:
        """Ask, and wait for the whole answer."""
        count = len(self.answers())
        if paths:
            self.add(*paths)
        self.ask(question)
        return self.finished(count + 1)

    def finished(self, count: int) -> str:
        """The last answer, once there are so many and the last one is complete."""
        until(lambda: len(self.notes()) == count and "picture tokens" in self.notes()[-1])
        self.page.get_by_label("Send").or_(self.page.locator("#box .submit-button")).wait_for()
        return self.answers()[-1]

    def answers(self) -> list[str]:
        texts = self.page.locator("#chat .bot-row").all_inner_texts()
        return [text.strip() for text in texts[::2]]

    def notes(self) -> list[str]:
        return self.page.locator("#chat .note").all_inner_texts()

    def questions(self) -> list[str]:
        texts = self.page.locator("#chat .user-row").all_inner_texts()
        return [text.strip() for text in texts if text.strip()]

    def button(self, label: str):
        return self.page.locator(f'#chat button[aria-label="{label}"]:visible').last

    def set_slider(self, label: str, value: int) -> None:
        """Type a value; again if the page, which has just unfolded its settings, was not ready for it."""
        number = self.page.get_by_label(f"number input for {label}")
        slider = self.page.get_by_label(f"range slider for {label}")

        def is_set() -> bool:
            number.fill(str(value))
            number.press("Tab")
            self.page.wait_for_timeout(100)
            return (number.input_value(), slider.input_value()) == (str(value), str(value))

        until(is_set)

    def set_longest(self, tokens: int) -> None:
        self.page.get_by_role("button", name="Settings").click()
        self.set_slider("Longest answer, in tokens", tokens)


@contextmanager
def opened(chromium, site, **options):
    """The page in a tab of its own; that it complained or asked another host for something is an error."""
    context = chromium.new_context(**options)
    context.set_default_timeout(60_000)
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if _is_foreign(request.url, site) else None)
    page.goto(site.url)
    yield Tab(page)
    context.close()
    assert complaints == []


def is_told_to_end(engine) -> bool:
    """Whether the engine has been told to end what it has, or has done so: steps may be left that it was given."""
    return bool(engine._thread._commands) or engine.stats().num_running == 0


def _is_foreign(url: str, site) -> bool:
    return not url.startswith((site.url, "data:", "blob:"))


def uploaded() -> list[Path]:
    walk = os.walk(process_uploads().folder)  # which does not mind that a folder goes meanwhile
    return [Path(folder, name) for folder, _, names in walk for name in names if Path(folder).name != "examples"]


@pytest.fixture(scope="module")
def offline():
    llm = LLM(None, dtype="float32", device="cpu", num_kvcache_blocks=256, skip_warmup=True)
    yield llm
    llm.exit()


def test_the_true_answer_comes_and_the_next_one_uses_the_caches(chromium, site, offline):
    with opened(chromium, site) as tab:
        want = offline.generate_multimodal([ask(SCENE, "Describe this image.")], use_tqdm=False)[0]
        assert tab.told("Describe this image.", SCENE) == want.text
        assert re.fullmatch(
            rf"First token after \d+\.\d\d s · \d+ tokens/s · 0 of {want.num_prompt_tokens} prompt tokens cached"
            rf" · {want.num_image_tokens} picture tokens",
            tab.notes()[0],
        )
        assert tab.told("What is written?") == '"4".'
        cached = int(re.search(r"(\d+) of \d+ prompt tokens cached", tab.notes()[1])[1])
        assert cached > want.num_image_tokens
        assert tab.page.locator("#gallery .caption-label").all_inner_texts() == [
            'What is written? "4".',
            f"Describe this image. {want.text}",
        ]


def test_the_cost_of_images_is_shown_before_asking_and_follows_the_resolution(chromium, site):
    with opened(chromium, site) as tab:
        cost = tab.page.locator("#cost")
        assert cost.inner_text() == "Up to 3 pictures of 488 KiB and 64 million pixels"
        tab.add(SCENE, OTHER)
        until(lambda: cost.inner_text() == "42 + 42 = 84 picture tokens")
        tab.page.get_by_role("button", name="Settings").click()
        for label, pixels in (("Most", 10_000), ("Fewest", 9_000)):
            tab.set_slider(f"{label} pixels of a picture", pixels)
        until(lambda: cost.inner_text() == "9 + 9 = 18 picture tokens")
        tab.ask("Describe this image.")
        tab.finished(1)
        assert tab.notes()[0].endswith("9 + 9 = 18 picture tokens")


def test_what_a_image_will_cost_is_no_longer_said_once_it_has_been_asked_about(chromium, site):
    with opened(chromium, site) as tab:
        tab.add(SCENE)
        cost = tab.page.locator("#cost")
        until(lambda: cost.inner_text() == "42 picture tokens")
        tab.box.press("Enter")  # no text, of whose change the page would tell
        until(lambda: cost.inner_text().startswith("Up to 3 pictures"))
        tab.finished(1)


def test_an_example_is_one_click_away(chromium, site):
    with opened(chromium, site) as tab:
        tab.page.locator("#chat .example").nth(1).click()
        assert tab.finished(1) == "Green."
        assert tab.questions() == ["What color is the star?"]
        assert tab.page.locator("#chat .component img").evaluate("image => image.decode().then(() => 1)") == 1


def test_retry_edit_undo_and_clear(chromium, site):
    with opened(chromium, site) as tab:
        tab.told("How many shapes are there?", OTHER, SCENE)
        tab.told("What is written?")
        num_finished = site.engine.stats().num_finished
        tab.button("Retry").click()
        until(lambda: site.engine.stats().num_finished > num_finished)  # until then, the old answer may be there
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
        assert tab.told("What is written?", SCENE) == '"4".'
        assert len(tab.questions()) == 1


def test_two_tabs_are_served_at_once_and_know_nothing_of_each_other(chromium, chatty_site):
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


def test_stop_ends_the_request_in_the_engine_within_a_step(chromium, chatty_site):
    engine = chatty_site.engine
    with in_steps(engine) as make_steps, opened(chromium, chatty_site) as tab:
        tab.set_longest(900)
        tab.ask("talk")
        make_steps(60)
        until(lambda: tab.answers() and len(tab.answers()[0]) > 20)
        tab.page.locator("#box .stop-button").click()
        until(lambda: is_told_to_end(engine))
        make_steps(1)
        until(lambda: engine.stats().num_running == 0)
        until(lambda: tab.notes()[0].startswith("Stopped · first token after"))
        tab.page.locator("#box .submit-button").wait_for()
        assert len(tab.answers()[0]) > 20
        tab.ask("again")
        make_steps(5)
        until(lambda: engine.stats().num_running == 1)


def test_a_closed_tab_ends_its_request_and_takes_its_images_with_it(chromium, chatty_site):
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
            until(lambda: is_told_to_end(engine))
            make_steps(1)
            until(lambda: engine.stats().num_running == 0)
        until(lambda: [path.name for path in uploaded()] == [SCENE.name])  # which the other tab has too
        assert stays.told("here?").strip()
    until(lambda: uploaded() == [])


def test_who_asks_while_the_engine_is_full_is_told_so_and_keeps_the_question(chromium, checkpoint):
    with (
        served(checkpoint, max_num_seqs=1, max_waiting=2) as site,
        ExitStack() as stack,
        in_steps(site.engine) as make_steps,
    ):
        tabs = [stack.enter_context(opened(chromium, site)) for _ in range(4)]
        for tab in tabs:
            tab.set_longest(1000)
        tabs[0].ask("question 0")
        make_steps(40)
        until(lambda: any(tabs[0].answers()))
        for tab, note in ((tabs[1], "Waiting, next in line"), (tabs[2], "Waiting, 1 ahead of you")):
            tab.ask("question")
            until(lambda tab=tab, note=note: tab.notes() == [note])
        tabs[3].ask("question 3")
        tabs[3].page.get_by_text("Many people are asking right now; try again in a moment").wait_for()
        assert (tabs[3].box.input_value(), tabs[3].questions()) == ("question 3", [])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"this is no picture", "broken.png is not a picture that can be read"),
        (None, "broken.png cannot be read; it may be damaged"),
    ],
)
def test_a_broken_file_gives_a_message_and_the_page_lives_on(content, message, chromium, site, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(SCENE.read_bytes()[:300] if content is None else content)
    with opened(chromium, site) as tab:
        tab.add(broken)
        if content is not None:
            until(lambda: tab.page.locator("#cost").inner_text() == message)
        tab.ask("Describe this image.")
        tab.page.locator(".toast-wrap").get_by_text(message).wait_for()
        assert tab.box.input_value() == "Describe this image."
        tab.page.locator("#box .delete-button").click()
        assert tab.told("What is written?", SCENE) == '"4".'


def test_too_many_images_are_refused_with_a_message(chromium, site):
    with opened(chromium, site) as tab:
        tab.add(*(IMAGES / f"scene-0{i}.png" for i in range(1, 5)))
        until(lambda: "4 pictures; at most 3" in tab.page.locator("#cost").inner_text())
        tab.ask("Describe this image.")
        tab.page.locator(".toast-wrap").get_by_text("4 pictures; at most 3 go into one question").wait_for()
        tab.page.locator("#box .delete-button").first.click()
        tab.ask("Describe this image.")
        assert tab.finished(1)


def test_a_file_that_is_too_large_is_refused_with_a_message(chromium, site, tmp_path):
    noise_image(900, 700).save(tmp_path / "large.bmp")
    with opened(chromium, site) as tab:
        tab.page.locator("#box input[type=file]").set_input_files(str(tmp_path / "large.bmp"))
        tab.page.locator(".toast-wrap").wait_for()
        assert "maximum allowed size" in tab.page.locator(".toast-wrap").inner_text()
        assert tab.told("What is written?", SCENE) == '"4".'


def test_a_conversation_that_is_too_long_for_the_model_is_refused_with_a_message(chromium, site):
    with opened(chromium, site) as tab:
        tab.ask("word " * 3000)
        tab.page.locator(".toast-wrap").get_by_text("max_model_len is 2048").wait_for()
        assert tab.questions() == []


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
def test_it_fits_every_width_in_light_and_dark(scheme, width, chromium, site):
    with opened(chromium, site, viewport={"width": width, "height": 800}, color_scheme=scheme) as tab:
        tab.told("Describe this image. " + "unbroken" * 30, SCENE, OTHER)
        tab.page.get_by_role("button", name="Settings").click()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate("document.querySelector('#chat .bubble-wrap').scrollWidth") <= width
        colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", colour)[:3])) < 60) == (scheme == "dark")


def test_nothing_that_is_said_makes_the_browser_ask_another_host(chromium, site):
    asked = []
    listener = socketserver.TCPServer(("127.0.0.1", 0), lambda *_: asked.append(1))
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{listener.server_address[1]}/x.png"
    context = chromium.new_context()
    page = context.new_page()
    page.goto(site.url)
    tab = Tab(page)
    tab.ask(f'![x]({url}) <img src="{url}">')
    tab.page.locator("#chat .user-row img").nth(1).wait_for(state="attached")
    until(lambda: "prompt tokens cached" in "".join(tab.notes()))
    context.close()
    listener.shutdown()
    listener.server_close()
    assert asked == []


def test_an_upload_that_is_refused_says_why_and_the_page_lives_on(chromium, site, tmp_path, monkeypatch):
    for i in range(7):  # of 400 KB, where three of 500 KB go into a question
        (tmp_path / f"{i}.png").write_bytes(SCENE.read_bytes() + bytes([i]) * 400_000)
    context = chromium.new_context()
    page = context.new_page()  # whose console may tell of the refusals
    page.goto(site.url)
    tab, says = Tab(page), page.locator(".toast-wrap").get_by_text
    choose = page.locator("#box input[type=file]").set_input_files
    choose([*tmp_path.iterdir()])
    says("Too much for one question; at most 3 pictures of 500,000 bytes go into it").wait_for()
    with monkeypatch.context() as patch:
        patch.setattr(uploads_module, "MAX_BYTES", 0)
        choose(OTHER)
        says("There is no room for more pictures right now; try again later").wait_for()
    assert tab.told("What is written?", SCENE) == '"4".'
    context.close()


@pytest.fixture
def mounted():
    """The page as `mmvllm serve --demo` has it."""
    engine = AsyncLLM(None, dtype="float32", device="cpu", num_kvcache_blocks=256, skip_warmup=True)
    with serving(engine, has_demo=True) as running:
        yield Site(f"{running.url}/demo/", engine)
    elsewhere(engine.shutdown(drain=False))


def test_the_page_works_where_the_server_mounts_it(chromium, mounted):
    with opened(chromium, mounted) as tab:
        assert tab.page.locator("#cost").inner_text().startswith("Up to 16 pictures of 20 MiB")
        assert tab.told("What is written?", SCENE) == '"4".'
        assert tab.told("Describe this image.")
        assert uploaded()
    until(lambda: uploaded() == [])
