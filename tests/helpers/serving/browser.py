"""The demo page in a browser tab."""

import base64
import mimetypes
import os
from contextlib import contextmanager
from pathlib import Path

from mmvllm.demo.uploads import process_uploads
from tests.helpers.serving.pages import until

IMAGES = Path(__file__).parents[3] / "examples" / "images"
SCENE, OTHER = IMAGES / "scene-05.png", IMAGES / "scene-10.png"
GIVE = """([kind, target, name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { ...options, dataTransfer: files })
    : new ClipboardEvent("paste", { ...options, clipboardData: files });
  document.querySelector(target).dispatchEvent(event);
  return event.defaultPrevented;
}"""


class Tab:
    """A browser tab with the page, and the actions of a visitor."""

    def __init__(self, page):
        self.page, self._has_left = page, False
        self.box = page.locator("#box textarea")
        self.box.wait_for()

    def leave(self) -> None:
        self._has_left = True
        self.page.goto("about:blank")

    def reload(self) -> None:
        self._has_left = True
        self.page.reload()

    def is_expected(self, problem: str) -> bool:
        """Whether a problem is that of a connection which broke because its page was left."""
        return self._has_left and any(words in problem for words in ("AbortError", "Connection errored out"))

    def add(self, *paths: Path) -> None:
        self.page.locator("#box input[type=file]").set_input_files([str(path) for path in paths])
        self.page.locator("#box .thumbnail-item").nth(len(paths) - 1).wait_for()

    def give(self, kind: str, target: str, path: Path) -> bool:
        """Drop or paste a file; returns whether the page keeps the browser from opening it."""
        type, _ = mimetypes.guess_type(path.name)
        return self.page.evaluate(GIVE, [kind, target, path.name, type, base64.b64encode(path.read_bytes()).decode()])

    def ask(self, question: str) -> None:
        self.box.fill(question)
        self.box.press("Enter")

    def answer_to(self, question: str, *paths: Path) -> str:
        """Ask a question, and wait for the complete answer."""
        count = len(self.answers())
        if paths:
            self.add(*paths)
        self.ask(question)
        return self.finished(count + 1)

    def finished(self, count: int) -> str:
        """The last answer, once there are this many answers and the last one is complete."""
        until(lambda: len(self.notes()) == count and self.notes()[-1].endswith("tokens"))
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
        """Type a value, repeatedly, since the page may not be ready when its settings have just been opened."""
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
    """The page in a new tab; errors on the console and requests to other hosts fail the test."""
    context = chromium.new_context(**options)
    context.set_default_timeout(60_000)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if _is_foreign(request.url, site) else None)
    page.goto(site.url)
    tab = Tab(page)
    yield tab
    context.close()
    assert [problem for problem in problems if not tab.is_expected(problem)] == [], problems


def is_ending(engine) -> bool:
    """Whether the engine has a pending abort or no running request; steps that it may make can be left."""
    return bool(engine._thread._commands) or engine.stats().num_running == 0


def _is_foreign(url: str, site) -> bool:
    return not url.startswith((site.url, "data:", "blob:"))


def uploaded() -> list[Path]:
    walk = os.walk(process_uploads().folder)  # which ignores folders that are removed during the walk
    return [Path(folder, name) for folder, _, names in walk for name in names if Path(folder).name != "examples"]
