"""The page's HTTP interface for clients other than its own script, and the command that serves it."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from mmvllm.cli import demo
from mmvllm.cli.main import main

pytest.importorskip("gradio")

from mmvllm.demo import page as page_module
from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo import session as session_module
from mmvllm.demo import unread as unread_module
from mmvllm.demo.route_filter import MAX_UNREAD
from mmvllm.demo.uploads import process_uploads
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.serving.demo import Work
from tests.helpers.serving.pages import CONTROLS, META, event, get, in_steps, post, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")


def visible_texts(config: dict) -> str:
    """The texts of the components, without scripts and styles."""
    names = ("value", "label", "placeholder", "html_template")
    return "\n".join(str(part["props"].get(name, "")) for part in config["components"] for name in names)


@pytest.mark.parametrize(
    "component, kind, data, about",
    [
        ("box", "submit", [None, *CONTROLS], None),
        ("box", "submit", [[1], *CONTROLS], None),
        ("box", "submit", [{"text": 5, "files": []}, *CONTROLS], None),
        ("box", "submit", [{"text": "", "files": [{"path": None, "meta": META}]}, *CONTROLS], None),
        ("box", "submit", [{"text": "", "files": json.loads("[" * 900 + "]" * 900)}, *CONTROLS], None),
        ("box", "submit", [{"text": "Hello", "files": []}, 5, *CONTROLS[1:]], None),
        ("box", "submit", [{"text": "Hello", "files": []}, *CONTROLS[:6], "x", *CONTROLS[7:]], None),
        ("box", "submit", [], None),
        ("camera", "input", [{"path": None}, {"text": "", "files": []}], None),
        ("conversations", "restore", [], None),
        ("conversations", "restore", [], {"turns": [{}], "final": True}),
        *(
            ("chat", kind, [{"text": "", "files": []}, *CONTROLS] if kind != "undo" else [], about)
            for kind in ("retry", "edit", "undo", "example_select")
            for about in (
                None,
                {},
                {"index": "x", "value": "x"},
                {"index": [0], "value": "x"},
                {"index": -1, "value": "x"},
            )
        ),
        ("chat", "edit", [{"text": "", "files": []}, *CONTROLS], {"index": 0, "value": ["x"]}),
    ],
)
def test_malformed_input_gets_a_message_and_leaves_no_state(component, kind, data, about, site, capsys):
    end, log = event(site, component, kind, data, "garbage", about)
    assert len(log) == 1 or "reload it" in end["output"]["error"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("meta", ["x", None, [], {"_type": "x"}])
def test_an_upload_without_what_marks_a_file_gets_a_message(meta, site, capsys):
    path = str(process_uploads().folder / "examples" / "scene-06.png")
    draft = {"text": "What is this?", "files": [{"path": path, "meta": meta}]}
    end, log = event(site, "box", "submit", [draft, *CONTROLS])
    assert ("reload it" in end["output"]["error"], log, capsys.readouterr().err) == (True, [], "")


@pytest.mark.parametrize("route", ["queue/join", "run/predict", "run/stop"])
def test_an_event_that_has_no_handler_is_refused(route, site, capfd):
    config = get(f"{site.url}config").json()
    in_browser = next(call["id"] for call in config["dependencies"] if not call["backend_fn"])
    known = {"data": [], "fn_index": site.events["chat", "clear"], "session_hash": "x"}
    bodies = [known | {"fn_index": index} for index in (in_browser, 9999, -1, 2**70, None, "x", 1.5, [], {})]
    for body in (*map(json.dumps, bodies), "[]", "", "\xff", '{"data": [], "fn_index": NaN}'):
        answer = post(f"{site.url}gradio_api/{route}", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.text) == (400, "There is no such event; reload the page"), body[:100]
    nested = post(f"{site.url}gradio_api/{route}", content="[" * 100_000)
    assert (nested.status_code, nested.text) == (413, "This has too many parts, or too long a number")
    assert post(f"{site.url}gradio_api/{route}", json=known).text != answer.text
    assert capfd.readouterr().err == ""


def test_a_range_of_a_file_is_served_and_an_odd_one_ignored(site, capfd):
    path = process_uploads().folder / "examples" / "scene-06.png"
    data = path.read_bytes()
    for given, want in {
        "bytes=1-2": data[1:3],
        "bytes=5-": data[5:],
        "bytes=-4": data[-4:],
        "bytes=1-2-3": data,
        "bytes=1-2,4-5": data,
        "bytes=a-b": data,
        "lines=1-2": data,
        "bytes=" + "9" * 5000 + "-": data,
    }.items():
        own = {"Cookie": "a=b", "Authorization": "Basic YQ==", "X-Accel-Redirect": "/x", "Content-Type": "text/html"}
        answer = get(f"{site.url}gradio_api/file={path}", headers={"Range": given, **own})
        assert answer.is_success and answer.content == want, given
        assert not {"cookie", "authorization", "x-accel-redirect", "user-agent"} & answer.headers.keys()
        assert answer.headers["content-type"] == "image/png"
    assert capfd.readouterr().err == ""


@pytest.mark.spawns
def test_no_visitor_can_remove_the_examples(site):
    examples = [*(process_uploads().folder / "examples").iterdir()]
    turns = [{"question": "q", "answer": "a", "note": "", "images": [*map(str, examples)]}]
    end, _ = event(site, "conversations", "restore", [], "examples", {"turns": turns, "final": True})
    assert examples and str(examples[0]) in json.dumps(end)
    event(site, "chat", "clear", [], "examples")
    assert all(path.exists() for path in examples)


@pytest.mark.spawns
def test_an_example_needs_no_browser(site):
    end, log = event(site, "chat", "example_select", [{"text": "", "files": []}, *CONTROLS], about={"index": 1})
    assert (end["success"], log) == (True, [])
    assert site.engine.stats().num_finished >= 1


def test_a_question_without_an_image_says_what_the_bundled_model_needs(site):
    before = site.engine.stats().num_finished
    _, log = event(site, "box", "submit", [{"text": "What is written?", "files": []}, *CONTROLS], "no-image")
    assert log == ["Add a picture first: this model answers questions about pictures only"]
    assert site.engine.stats().num_finished == before


def test_results_that_nobody_reads_take_little_memory(site, monkeypatch):
    """A session with a long conversation could have megabytes for each of its unread results."""
    monkeypatch.setattr(unread_module, "MAX_UNREAD_BYTES", 400_000)
    turn = {"question": "q" * 500, "answer": "a" * 500, "note": "<" * 200, "images": []}
    for number, num_turns in ((0, 1), (1, 60), (2, 1), (3, 60)):
        body = {"data": [], "fn_index": site.events["conversations", "restore"], "session_hash": f"large-{number}"}
        body["event_data"] = {"turns": [turn] * num_turns, "final": True}
        for _ in range(2):
            assert post(f"{site.url}gradio_api/queue/join", json=body).is_success
        until(lambda: not site.page._queue.event_ids_to_events)
    known = [site.page.has_results(f"large-{number}") for number in range(4)]
    assert known[0] and known[2] and [known[1], known[3]].count(False) >= 1
    assert event(site, "chat", "clear", [], "another")[0]["success"]
    for number in range(4):
        site.page.sessions.drop(f"large-{number}")


def test_a_browser_that_reads_slowly_loses_its_session(site, monkeypatch):
    monkeypatch.setattr(unread_module, "MAX_UNREAD_BYTES", 20_000_000)
    turn = {"question": "😀" * 100_000, "answer": "😀" * 100_000, "note": "", "images": []}
    index, slow = site.events["conversations", "restore"], []
    for number in range(8):
        body = {"data": [], "fn_index": index, "session_hash": f"slow-{number}"}
        body["event_data"] = {"turns": [turn], "final": True}
        assert post(f"{site.url}gradio_api/queue/join", json=body).is_success
        connection = socket.create_connection(("127.0.0.1", urlsplit(site.url).port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            f"GET /gradio_api/queue/data?session_hash=slow-{number} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        )
        slow.append(connection)
    until(lambda: not site.page._queue.event_ids_to_events)
    until(lambda: sum(site.page.has_results(f"slow-{number}") for number in range(8)) < 6)
    assert event(site, "chat", "clear", [], "another")[0]["success"]
    for number, connection in enumerate(slow):
        connection.close()
        site.page.sessions.drop(f"slow-{number}")


def test_a_warning_is_short_whatever_it_is_about(site):
    values = [*CONTROLS]
    values[0] = ["'" * 100_000]
    _, log = event(site, "chat", "example_select", [{"text": "", "files": []}, *values], "warned", {"index": 0})
    assert len(log) == 1 and len(log[0]) < 2000


def test_results_that_nobody_reads_are_few_and_go_with_their_session(site):
    body = {"data": [], "fn_index": site.events["chat", "clear"], "session_hash": "unread"}
    answers = [post(f"{site.url}gradio_api/queue/join", json=body).status_code for _ in range(MAX_UNREAD + 2)]
    assert answers == [200] * MAX_UNREAD + [429] * 2
    page = site.page
    until(lambda: not page._queue.event_ids_to_events)  # all have ended
    assert page.num_unread("unread") == MAX_UNREAD and "unread" in page.state_holder
    page.sessions._remove(page.sessions.get("unread"))
    assert page.num_unread("unread") == 0 and "unread" not in page.state_holder
    assert "unread" not in page._queue.pending_messages_per_session
    assert event(site, "chat", "clear", [], "unread")[0]["success"]


def test_a_session_whose_events_fail_is_forgotten_like_any_other(site, monkeypatch):
    """Gradio keeps the inputs that it reads before it finds the wrong one: megabytes of each session."""
    monkeypatch.setattr(session_module, "MAX_CLOSED", 3)
    large, before = {f"key {i}": i for i in range(1000)}, len(site.page.state_holder.session_data)
    for number in range(8):
        end, _ = event(site, None, "change", ["[]", large, 0, 1, 0, 1, 8, -1, "abc", 1, 1], f"fails-{number}")
        assert not end["success"]
    assert len(site.page.state_holder.session_data) <= max(before, 3) + 1


def test_values_of_components_are_not_kept(site):
    """Gradio would keep the values of every session, even the ones that it refuses."""
    long = "\N{ROCKET}" + "a" * 100_000
    for values in (["[]", *CONTROLS], ["[]", long, *CONTROLS[1:]], [long, *CONTROLS]):
        event(site, None, "change", values, "kept")
    assert long not in str(site.page.state_holder.session_data["kept"].config_values)


def test_many_long_answers_keep_no_one_from_the_other_events(chatty_site):
    asked, index = 60, chatty_site.events["box", "submit"]
    with in_steps(chatty_site.engine):
        for number in range(asked):
            body = {"data": [{"text": "talk", "files": []}, *CONTROLS], "fn_index": index}
            answer = post(f"{chatty_site.url}gradio_api/queue/join", json=body | {"session_hash": f"long-{number}"})
            assert answer.is_success
        assert chatty_site.engine.health().status == "ok"
        assert event(chatty_site, "chat", "clear", [], "another")[0]["success"]
    until(lambda: not chatty_site.page._queue.event_ids_to_events)  # the answers are short, now that there are steps


def test_a_model_that_takes_text_alone_needs_no_image(chatty_site):
    end, log = event(chatty_site, "box", "submit", [{"text": "Hello", "files": []}, *CONTROLS])
    assert (end["success"], log) == (True, [])


def test_the_header_names_the_model_and_warns_of_the_bundled_one(site, chatty_site, checkpoint):
    bundled, other = get(f"{site.url}config").text, get(f"{chatty_site.url}config").text
    assert "only knows drawings like its examples" in bundled and "bundled demonstration model" in bundled
    assert "only knows drawings" not in other and f"<p>{checkpoint.name}</p>" in other
    assert str(checkpoint) not in other  # visitors need not know the server's folders


def test_no_words_of_the_page_name_command_line_options(site):
    assert re.findall(r"(?<![\w-])--[a-z]{2}[a-z-]+\b(?!:|\)|,)", visible_texts(get(f"{site.url}config").json())) == []


def test_the_page_keeps_no_names_of_files_and_no_times_of_events(site, monkeypatch):
    monkeypatch.setattr(route_filter_module, "FORGET_SECONDS", 0.0)
    page, image = site.page, ("a.png", encode(noise_image(60, 60)))
    (path,) = post(f"{site.url}gradio_api/upload?upload_id=known", files={"files": image}).json()
    until(lambda: "known" not in page_module.file_upload_statuses._statuses, 20)
    asked = {"text": "What?", "files": [{"path": path, "meta": META}]}
    for _ in range(2):
        end, _ = event(site, "box", "submit", [asked, *CONTROLS], "history")
        assert end["success"]
    assert not page.upload_file_set and not any(block.temp_files for block in page.blocks.values())
    assert len(page._queue.event_analytics) <= 1


def test_a_disconnect_during_an_upload_logs_no_traceback(site, caplog):
    uploads, url = process_uploads(), httpx.URL(site.url)
    logger = logging.getLogger("uvicorn.error")  # which does not propagate to the root logger, where caplog listens
    logger.addHandler(caplog.handler)
    try:
        with socket.create_connection((url.host, url.port)) as connection:
            head = "POST /gradio_api/upload HTTP/1.1", f"Host: {url.host}", "Content-Length: 1000"
            form = "Content-Type: multipart/form-data; boundary=x"
            connection.sendall("\r\n".join((*head, form, "", "--x\r\n")).encode())
            until(lambda: [upload.num_bytes for upload in uploads._incoming] == [1000])
        until(lambda: uploads._incoming == [])
        get(site.url)  # a traceback would have been logged by now
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_there_is_no_public_api(site):
    info = get(f"{site.url}gradio_api/info").json()
    assert (info["named_endpoints"], info["unnamed_endpoints"]) == ({}, {})


def test_only_the_routes_of_gradio_that_the_page_needs_are_served(site):
    answer = get(f"{site.url}gradio_api/proxy=https://example.com/")
    assert (answer.status_code, answer.text) == (404, "There is nothing here")


@contextmanager
def command_with_a_page(folder: Path, *words: str, ends_with: str) -> Iterator[list[str]]:
    """The words of the first line that `mmvllm` prints; SIGTERM ends it quietly, and it leaves no file."""
    command = [sys.executable, "-m", "mmvllm", *words, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, "TMPDIR": str(folder)}) as process:
        yield process.stdout.readline().split()
        assert [*folder.glob("mmvllm-page-*")]
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    notice, _, said = said.partition("\n")
    assert "bundled demonstration model" in notice
    assert (process.returncode, said) == (0, ends_with)
    assert [*folder.glob("mmvllm-page-*")] == []


@pytest.mark.slow
def test_the_command_requires_a_login_and_leaves_no_file(tmp_path):
    (tmp_path / "users").write_text("ann:secret\n")
    with command_with_a_page(tmp_path, "demo", "--auth-file", str(tmp_path / "users"), ends_with="") as line:
        url = line[2]
        assert url.startswith("http://127.0.0.1:")
        assert get(f"{url}config").status_code == 401
        assert get(f"{url}gradio_api/heartbeat/abc").status_code == 401
        with httpx.Client() as client:
            client.post(f"{url}login", data={"username": "ann", "password": "secret"}).raise_for_status()
            assert client.get(f"{url}config").json()["title"] == "mmvllm"
        for start in (b"GET /?", b"GET / HTTP/1.1\r\nX: "):  # as the server's, the head of a request has a size
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
                connection.sendall(start + b"a" * 100_000)
                assert connection.recv(100).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
            upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n"
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + upgrade + b"Content-Length: 5\r\n\r\nabcde")
            connection.settimeout(20)
            assert connection.recv(100).startswith(b"HTTP/1.1 ")


@pytest.mark.network
@pytest.mark.spawns
def test_a_server_with_the_page_exits_quietly(tmp_path):
    told = "shutting down: finishing the requests in flight; interrupt again to abort them\n"
    with command_with_a_page(tmp_path, "serve", "--demo", "--port", "0", ends_with=told) as line:
        assert get(f"{line[-1]}config").json()["title"] == "mmvllm"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--auth", "secret"], "--auth is not USER:PASSWORD"),
        (["--auth", "ann:secret", "secret"], "--auth is not USER:PASSWORD"),
        (["--auth", ":secret"], "--auth is not USER:PASSWORD"),
        (["--auth-file", "{folder}/token"], "token: a line is not USER:PASSWORD"),
        (["--auth-file", "{folder}/empty"], "is empty; write USER:PASSWORD"),
        (["--auth-file", "{folder}/none"], "No such file"),
        (["--auth-file", "{folder}/latin"], "latin cannot be read: it is text neither in UTF-8"),
        (["--max-image-pixels", "999999999999"], "--max-image-pixels must be from 1 to"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options, message, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"ann:secret\xe4\n")
    (tmp_path / "token").write_text("ann:secret\nsecret\n")
    assert main(["demo", "--model", "/no/such/model", *(option.format(folder=tmp_path) for option in options)]) == 2
    told = capsys.readouterr().err
    assert message in told and "secret" not in told


@pytest.mark.parametrize(
    "options",
    [["--auth", " ann: a:b \n", "bob:c"], ["--auth", "ann:a:b", "--auth", "bob:c"], ["--auth-file", "{folder}/users"]],
    ids=["after one option", "after two", "in a file"],
)
def test_logins_are_taken_without_the_white_space_around_them(options, tmp_path):
    (tmp_path / "users").write_bytes(b"\xef\xbb\xbfann :a:b \r\n\r\nbob:c")
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([option.format(folder=tmp_path) for option in options])
    assert demo._users(args) == [("ann", "a:b"), ("bob", "c")]


@pytest.mark.network
def test_a_taken_port_is_reported_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert main(["demo", "--model", "/no/such/model", "--port", str(number)]) == 2
    assert f"cannot listen on 127.0.0.1:{number}" in capsys.readouterr().err


def test_without_gradio_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("mmvllm.cli.demo.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "mmvllm[demo]"' in capsys.readouterr().err


def test_the_packaged_examples_are_those_of_the_repository():
    root = Path(__file__).parents[2]
    packaged = [*(root / "mmvllm" / "demo" / "examples").iterdir()]
    assert packaged
    for path in packaged:
        assert path.read_bytes() == (root / "examples" / "images" / path.name).read_bytes()


@pytest.mark.parametrize("name", ["preprocess_data", "postprocess_data"])
def test_of_several_events_one_is_read_or_shown_at_a_time(name, monkeypatch):
    work = Work()

    async def slow(self, *args, **kwargs):
        await work.do()
        return []

    async def visit():
        page = page_module.Page(analytics_enabled=False)
        await asyncio.gather(*(getattr(page, name)(None, []) for _ in range(5)))

    monkeypatch.setattr(page_module.gr.Blocks, name, slow)
    asyncio.run(visit())
    assert work.peak == 1
