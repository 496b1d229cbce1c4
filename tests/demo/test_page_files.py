"""What a visitor can name in place of an uploaded file, on the page that is launched and on the one that is mounted.

Gradio checks the paths of files on a page that it has launched itself, and only there.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.policy import MediaPolicy
from tests.helpers.needs import needs
from tests.helpers.serving.pages import CONTROLS, META, Site, elsewhere, event, post, served, until
from tests.helpers.serving.server import ENGINE, serving

pytest.importorskip("gradio")
from gradio import processing_utils

from mmvllm.demo.uploads import process_uploads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")

SECRET = "a-text-that-nobody-has-uploaded"
# {secret} and {fifo} lie in the folder {base}, which is the working directory; {folder} has the uploads.
PATHS = {
    "a file": "{secret}",
    "a relative path": "secret.txt",
    "a file of the system": "/etc/hostname",
    "a traversal": "{folder}/../{up}",
    "a traversal through an upload": "{folder}/examples/../../{up}",
    "a traversal through a file": "{folder}/examples/scene-06.png/../../../{up}",
    "an encoded traversal": "{folder}/%2e%2e/{up}",
    "a traversal with backslashes": "{folder}\\..\\{up}",
    "a folder with the same beginning": "{folder}-other/secret.txt",
    "a link in the folder": "{folder}/link.txt",
    "a link in place of an upload": "{folder}/examples/link.txt",
    "a link to a folder": "{folder}/linked/secret.txt",
    "a link to a device": "{folder}/zero",
    "the environment": "/proc/self/environ",
    "the root of a process": "/proc/self/root{secret}",
    "the working directory of a process": "/proc/self/cwd/secret.txt",
    "an open file": "/proc/self/fd/{descriptor}",
    "a FIFO": "{fifo}",
    "a FIFO in the folder": "{folder}/examples/fifo",
    "an endless device": "/dev/zero",
    "a terminal": "/dev/tty",
    "the home folder": "~/secret.txt",
    "a folder": "{base}",
    "the folder of uploads": "{folder}",
    "nothing": "",
    "a null character": "{secret}\0.png",
    "a null character in the folder": "{folder}/a\0.png",
    "a lone surrogate": "{folder}/\ud800.png",
    "a long name": "/" + "a" * 5000,
    "a file URL": "file://{secret}",
    "a URL": "https://example.com/a.png",
    "a URL of this machine": "http://127.0.0.1:1/a.png",
    "a data URL": "data:text/plain,x",
    "gradio's own route": "/gradio_api/file={secret}",
}
LONG = "{folder}/" + "a/" * 100_000
HARMLESS = "{folder}/examples/fifo"  # where an upload would be; an event may ignore it where it expects no file


@pytest.fixture(scope="module", params=["mounted", "launched"])
@needs("network")
def page(request) -> Iterator[Site]:
    if request.param == "launched":
        with served(policy=MediaPolicy(max_bytes=500_000), max_images=3) as site:
            yield site
    else:
        engine = AsyncLLM(**ENGINE)
        with serving(engine, demo=True, api_keys=("secret",)) as running:
            yield Site(f"{running.url}/demo/", engine)
        elsewhere(engine.shutdown(drain=False))


@pytest.fixture
def names(tmp_path, monkeypatch) -> Iterator[dict[str, str]]:
    """What the braces in `PATHS` are replaced by; the files and links that they name exist."""
    folder = process_uploads().folder
    secret = tmp_path / "secret.txt"
    other = Path(f"{folder}-other")
    other.mkdir()
    for path in (secret, other / "secret.txt"):
        path.write_text(SECRET)
    links = {folder / "link.txt": secret, folder / "linked": tmp_path, folder / "zero": Path("/dev/zero")}
    links[folder / "examples" / "link.txt"] = secret
    for link, target in links.items():
        link.symlink_to(target)
    fifos = tmp_path / "fifo", folder / "examples" / "fifo"
    for fifo in fifos:
        os.mkfifo(fifo)
    monkeypatch.chdir(tmp_path)  # gradio trusts the working directory
    monkeypatch.setenv("HOME", str(tmp_path))
    up = os.path.relpath(secret, folder.parent)
    with secret.open() as file:
        names = {"folder": folder, "secret": secret, "base": tmp_path, "fifo": fifos[0], "up": up}
        yield {name: str(path) for name, path in names.items()} | {"descriptor": str(file.fileno())}
    for path in (*links, fifos[1], other / "secret.txt"):
        path.unlink()
    other.rmdir()


_refusing: tuple[set[str], list[str]] | None = None


def _refuse_opening(name: str, arguments: tuple) -> None:
    if name == "open" and _refusing is not None and isinstance(arguments[0], str | bytes | Path):
        targets, opened = _refusing
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path in targets:
            opened.append(path)
            raise PermissionError(f"{path} was opened")  # so that a FIFO cannot block the test


sys.addaudithook(_refuse_opening)


@contextmanager
def opening(*paths: str) -> Iterator[list[str]]:
    """The files that were opened while the `with` runs, of those that the paths name in any way."""
    global _refusing
    targets = {os.path.realpath(path) for path in paths if "\0" not in path and "\ud800" not in path}
    opened: list[str] = []
    _refusing = targets, opened
    try:
        yield opened
    finally:
        _refusing = None


def places(path: str, upload: str) -> Iterator[tuple[str | None, str, list, dict | None]]:
    """Events with the path wherever a page, or gradio, may look for one."""
    file, good, empty = {"path": path, "meta": META}, {"path": upload, "meta": META}, {"text": "", "files": []}
    photos = {
        "as gradio's pages send it": file,
        "without what marks a file": {"path": path},
        "as a stream": {**file, "is_stream": True},
        "with the URL of an upload": {**file, "url": "/gradio_api/file=" + upload, "orig_name": "a.png"},
        "in place of a path": {"path": file, "meta": META},
        "beside an upload": {**good, "url": file},
        "beside an upload that is not marked": {"path": upload, "x": file},
        "in what marks an upload": {"path": upload, "meta": {**META, "x": file}},
        "in lists": [[[file]]],
    }
    for photo in photos.values():
        yield "camera", "input", [photo, empty], None
    yield "camera", "input", [good, {"text": "", "files": [good, file]}], None
    yield "camera", "input", [None, {"text": file, "files": []}], None
    yield "box", "submit", [{"text": "What is this?", "files": [file]}, *CONTROLS], None
    yield "box", "submit", [{"text": "What is this?", "files": [good]}, file, *CONTROLS[1:]], None
    for kind in ("retry", "edit", "example_select"):
        yield "chat", kind, [{"text": "", "files": [file]}, *CONTROLS], {"index": 0, "value": "x"}
    yield None, "change", [json.dumps([path]), *CONTROLS], None
    yield None, "change", [file, *CONTROLS], None
    turn = {"question": "q", "answer": "a", "note": "", "images": [path]}
    yield "conversations", "restore", [], {"turns": [turn], "final": True}
    yield "conversations", "restore", [file], {"turns": [file], "final": True}
    yield "chat", "undo", [], {"index": 0, "value": file}


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.essential(1)
@pytest.mark.spawns
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_an_event_opens_copies_fetches_and_gives_out_no_other_file(path, page, names, monkeypatch, capsys):
    fetched = []

    async def fetch(url, **_):
        fetched.append(url)
        return names["secret"]

    monkeypatch.setattr(processing_utils, "async_ssrf_protected_download", fetch)
    is_harmless = path == HARMLESS
    folder, path = process_uploads().folder, path.format(**names)
    upload = str(folder / "examples" / "scene-06.png")
    before, num_finished = everything(folder), page.engine.stats().num_finished
    with opening(path, names["secret"], "/proc/self/environ") as opened:
        for *place, about in places(path, upload):
            end, log = event(page, *place, about=about)
            is_refused = not end["success"] or log or 'role=\\"alert\\"' in json.dumps(end)
            assert (opened, fetched) == ([], []), place
            assert SECRET not in json.dumps([end, log]), place
            assert everything(folder) == before, place
            assert is_refused or is_harmless or place[0] == "conversations", (place, end)
    assert page.engine.stats().num_finished == num_finished or is_harmless
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path in PATHS.values() if "\ud800" not in path])
def test_no_other_file_is_served(path, page, names):
    path = path.format(**names)
    with opening(path, names["secret"]) as opened:
        for method in ("GET", "HEAD"):
            answer = httpx.request(method, f"{page.url}gradio_api/file={quote(path)}", timeout=60)
            assert answer.status_code == 404, answer.text
    assert opened == []


@pytest.mark.parametrize(
    "component, kind, data, about",
    [
        ("camera", "input", [{"path": LONG}, {"text": "", "files": []}], None),
        ("box", "submit", [{"text": "", "files": [{"path": "{folder}/examples/a.png"}] * 4000}, *CONTROLS], None),
        (None, "change", [json.dumps([LONG]), *CONTROLS], None),
        (None, "change", [json.dumps(["{folder}/examples/a.png"] * 10_000), *CONTROLS], None),
        ("conversations", "restore", [], {"turns": [{"question": "", "answer": "", "note": "", "images": [LONG]}]}),
        ("chat", "undo", [], {"index": 0, "value": {"path": LONG}}),
        ("chat", "undo", [], {"path": LONG}),
    ],
)
def test_no_event_has_many_folders_or_files_looked_up(component, kind, data, about, page, monkeypatch):
    """Each would keep everyone waiting for seconds: `realpath` takes quadratic time."""
    looked_up, real = [], os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **keys: (looked_up.append(path), real(path, **keys))[1])
    folder = str(process_uploads().folder)
    sent = json.loads(json.dumps([data, about]).replace("{folder}", folder))
    event(page, component, kind, sent[0], about=sent[1])
    assert sum(str(path).startswith(folder) for path in looked_up) <= 5000


FILE_PART = '--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n1\r\n'
FIELD_PART = '--x\r\nContent-Disposition: form-data; name="files"\r\n\r\n'


def begin_upload(page: Site, body: str, about: str = "multipart/form-data; boundary=x") -> str:
    """Send the first part of the body of an upload; returns the response, which must come before the rest."""
    url = httpx.URL(page.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        first = f"POST {url.path}gradio_api/upload?upload_id=a HTTP/1.1"
        head = first, f"Host: {url.host}", f"Content-Type: {about}", f"Content-Length: {2**28}"
        connection.sendall("\r\n".join((*head, "", body)).encode())
        received = b""
        while received.endswith(b"\r\n\r\n") or b"\r\n\r\n" not in received:  # the text follows the head
            more = connection.recv(4096)
            assert more, f"closed after {received!r}"
            received += more
    return received.decode()


@pytest.mark.network
@pytest.mark.parametrize(
    "body, said",
    [
        (FILE_PART * 100, "files go into one question"),
        (FILE_PART * 1000, "files go into one question"),
        (FIELD_PART, "An upload consists of files"),
        (FILE_PART + FIELD_PART, "An upload consists of files"),
        (FIELD_PART.replace("; name", "; x"), "An upload consists of files"),
        ("--x\r\nContent-Type: image/png\r\n\r\n1", "An upload consists of files"),
        ("y" * 100, "Could not parse"),
        ("--x\r\nX: " + "y" * 100_000, "maximum allowed size"),
    ],
    ids=lambda text: text[:8],
)
def test_an_upload_is_refused_at_its_first_part_that_is_not_one_of_few_files(body, said, page):
    before = everything(process_uploads().folder)
    response = begin_upload(page, body)
    assert said in response and response.startswith("HTTP/1.1 4")
    until(lambda: everything(process_uploads().folder) == before)


FORM = "multipart/form-data"
NO_FORMS = ["text/plain", FORM, f"{FORM}; boundary=", "x" * 1000, f"{FORM}; boundary={'x' * 257}"]
NO_FORMS += [f"{FORM}; charset=undefined; boundary=x", f"{FORM}; charset=utf-16; boundary=x"]


@pytest.mark.network
@pytest.mark.parametrize("about", NO_FORMS)
def test_an_upload_that_is_no_form_is_refused(about, page):
    assert begin_upload(page, FILE_PART, about).startswith("HTTP/1.1 4")


@pytest.mark.network
def test_all_files_of_a_question_can_be_sent_together(page):
    files = [("files", (f"{i}.txt", f"text {i}")) for i in range(5)]
    paths = post(f"{page.url}gradio_api/upload", files=files).json()
    assert [Path(path).read_text() for path in paths] == [f"text {i}" for i in range(5)]


NAMES = [
    "",
    "/",
    ".",
    "..",
    "../../a.png",
    "..\\a.png",
    "%2e%2e%2fa.png",
    " ",
    "a" * 300 + ".png",
    "é" * 200,
    "a\0.png",
]


@pytest.mark.network
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_an_upload_leads_nowhere(name, page, capsys):
    folder = process_uploads().folder
    beside = {*folder.parent.iterdir()}
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    form = {"Content-Type": f"{FORM}; boundary=x"}
    answer = post(f"{page.url}gradio_api/upload", content=f"{head}text\r\n--x--\r\n".encode(), headers=form)
    assert answer.status_code in (200, 400), answer.text
    for path in answer.json() if answer.is_success else ():
        assert process_uploads().find(path).read_text() == "text"
    assert not {path for path in {*folder.parent.iterdir()} - beside if path.name.endswith("a.png")}
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.spawns
@pytest.mark.parametrize("path", ["{secret}", "/proc/self/environ", "{folder}/examples/fifo"])
def test_an_event_without_a_queue_opens_and_gives_out_no_other_file(path, page, names):
    folder, path = process_uploads().folder, path.format(**names)
    before = everything(folder)
    upload, file = str(folder / "examples" / "scene-06.png"), {"path": path, "meta": META}
    stop = "box", "stop", [file], {"index": 0, "value": file}  # the event that gradio's pages send so
    with opening(path, names["secret"], "/proc/self/environ") as opened:
        for component, kind, data, about in (*places(path, upload), stop):
            body = {"data": data, "fn_index": page.events[component, kind], "session_hash": "run", "event_data": about}
            answer = post(f"{page.url}gradio_api/run/predict", json=body)
            is_refused = answer.status_code == 404 or "only files that were uploaded here" in answer.text
            assert is_refused or (kind == "stop" and path.startswith(f"{folder}/")), (component, kind, answer.text)
            assert SECRET not in answer.text and (opened, everything(folder)) == ([], before), (component, kind, data)
