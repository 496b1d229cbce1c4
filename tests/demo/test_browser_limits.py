"""Refusals and errors on the page in a real browser: the message is shown, and the page still works."""

import socketserver
import threading

import pytest

from mmvllm.demo import uploads as uploads_module
from tests.helpers.engine.requests import noise_image
from tests.helpers.serving.browser import OTHER, SCENE, Tab, opened
from tests.helpers.serving.pages import until

pytest.importorskip("gradio")
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("broken.png", SCENE.read_bytes()[:300], "broken.png: cannot be decoded, damaged or truncated"),
        ("broken.mp4", b"this is no video", "broken.mp4: is not a video"),
    ],
    ids=["picture", "video"],
)
def test_a_broken_file_gives_a_message_and_the_page_still_works(name, content, message, chromium, site, tmp_path):
    broken = tmp_path / name
    broken.write_bytes(content)
    with opened(chromium, site) as tab:
        tab.add(broken)
        until(lambda: message in tab.page.locator("#cost").inner_text())  # before it is asked about
        tab.ask("Describe this image.")
        tab.page.locator(".toast-wrap").get_by_text(message).wait_for()
        assert tab.box.input_value() == "Describe this image."
        tab.page.get_by_role("button", name="Remove video" if name.endswith("mp4") else "Remove picture").click()
        until(lambda: tab.page.locator("#cost").inner_text().startswith("Up to 3 pictures"))
        assert tab.answer_to("What is written?", SCENE) == '"4".'


def test_a_file_that_is_too_large_is_refused_with_a_message(chromium, site, tmp_path):
    noise_image(900, 700).save(tmp_path / "large.bmp")
    with opened(chromium, site) as tab:
        tab.page.locator("#box input[type=file]").set_input_files(str(tmp_path / "large.bmp"))
        tab.page.locator(".toast-wrap").wait_for()
        assert "maximum allowed size" in tab.page.locator(".toast-wrap").inner_text()
        assert tab.answer_to("What is written?", SCENE) == '"4".'


def test_no_answer_makes_the_browser_fetch_from_another_host(chromium, site):
    asked = []
    listener = socketserver.TCPServer(("127.0.0.1", 0), lambda *_: asked.append(1))
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{listener.server_address[1]}/x.png"
    context = chromium.new_context()
    page = context.new_page()
    page.goto(site.url)
    tab = Tab(page)
    tab.add(SCENE)
    tab.ask(f'![x]({url}) <img src="{url}">')
    tab.page.locator("#chat .user-row img").nth(1).wait_for(state="attached")
    until(lambda: "prompt tokens cached" in "".join(tab.notes()))
    context.close()
    listener.shutdown()
    listener.server_close()
    assert asked == []


def test_a_refused_upload_gives_a_message_and_the_page_still_works(chromium, site, tmp_path, monkeypatch):
    for i in range(9):  # 9 files of 400 KB; a question takes five of 500 KB
        (tmp_path / f"{i}.png").write_bytes(SCENE.read_bytes() + bytes([i]) * 400_000)
    context = chromium.new_context()
    page = context.new_page()  # the console may report the refusals
    page.goto(site.url)
    tab, says = Tab(page), page.locator(".toast-wrap").get_by_text
    choose = page.locator("#box input[type=file]").set_input_files
    choose([*tmp_path.iterdir()])
    says("at most 3 pictures of 500,000 bytes and 2 videos of 500,000 bytes go into it").wait_for()
    with monkeypatch.context() as patch:
        patch.setattr(uploads_module, "MAX_BYTES", 0)
        choose(OTHER)
        says("There is no room for more files right now; try again later").wait_for()
    assert tab.answer_to("What is written?", SCENE) == '"4".'
    context.close()
