"""Gradio's own files are compressed once, uploaded files never."""

import asyncio
import gzip
import random
import re

import httpx
import pytest
from starlette.responses import PlainTextResponse, Response

from mmvllm.demo import assets
from mmvllm.demo.assets import CompressedFiles, as_it_is, is_file
from tests.demo.filtering import Sent, client, scope_of
from tests.helpers.serving.pages import get

TEXT = "".join(random.Random(0).choices("ab", k=400_000)).encode()


def answered(files: CompressedFiles, app, scope: dict) -> httpx.Response:
    """The response as a client reads it."""
    sent = []

    async def send(message):
        sent.append({**message, "headers": [*message["headers"]]} if "headers" in message else message)
        message.get("headers", []).append((b"x-of-middleware", b"a"))

    asyncio.run(files.respond(app, scope, client(), send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=body)


class Files:
    """An application with a file of each path that does not begin with /no; counts how often it is asked."""

    def __init__(self):
        self.num_made = 0

    async def __call__(self, scope, receive, send):
        self.num_made += 1
        response = Response(TEXT, media_type="text/javascript", headers={"ETag": '"a"', "Accept-Ranges": "bytes"})
        if scope["path"].startswith("/no"):
            response = PlainTextResponse("There is nothing here", 404)
        await response(scope, receive, send)


def test_a_file_is_made_and_compressed_once():
    files, app = CompressedFiles(), Files()
    for _ in range(3):
        response = answered(files, app, scope_of("/assets/a.js", accept_encoding="gzip, br"))
        assert "x-of-middleware" not in response.headers
        assert response.content == TEXT and response.headers["content-encoding"] == "gzip"
        assert response.headers["etag"] == 'W/"a"' and "accept-ranges" not in response.headers
        assert "accept-encoding" in response.headers["vary"].lower()
        assert int(response.headers["content-length"]) < len(TEXT) / 4
    assert app.num_made == 1
    assert answered(files, app, scope_of("/assets/b.js", accept_encoding="gzip")).content == TEXT and app.num_made == 2


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("/assets/a.js"),
        scope_of("/assets/a.js", accept_encoding="br"),
        scope_of("/assets/a.js", accept_encoding="gzip", range="bytes=0-9"),
        scope_of("/assets/a.js", method="HEAD", accept_encoding="gzip"),
    ],
)
def test_a_part_of_a_file_and_one_for_other_clients_are_not_compressed(scope):
    response = answered(CompressedFiles(), Files(), scope)
    assert "content-encoding" not in response.headers and response.content == TEXT


def test_only_files_are_kept_and_only_so_many_bytes(monkeypatch):
    files, app = CompressedFiles(), Files()
    for _ in range(2):
        response = answered(files, app, scope_of("/no/assets/a.js", accept_encoding="gzip"))
        assert (response.status_code, response.text) == (404, "There is nothing here")
    assert app.num_made == 2
    monkeypatch.setattr(assets, "MAX_BYTES", 1000)
    for _ in range(2):
        assert answered(files, app, scope_of("/assets/a.js", accept_encoding="gzip")).content == TEXT
    assert app.num_made == 4


@pytest.mark.parametrize("path", ["/assets/a-B_1.js", "/demo/static/css/a.min.css", "/static/img/x.svg"])
def test_a_file_has_one_path(path):
    assert is_file(path)
    folder, _, name = path.rpartition("/")
    assert not any(map(is_file, (f"{folder}//{name}", f"{folder}/../a/{name}", f"{folder}/./{name}", f"{path}/", name)))


def test_an_encoding_that_a_response_has_is_kept():
    sent, response = Sent(), Response(gzip.compress(TEXT), headers={"Content-Encoding": "gzip"})
    asyncio.run(response(scope_of(), None, as_it_is(sent)))
    assert [value for name, value in sent[0]["headers"] if name == b"content-encoding"] == [b"gzip"]


@pytest.mark.parametrize("name", ["a.txt", "a.js", "a.svg"])
def test_no_file_of_a_visitor_is_compressed(name, site):
    (path,) = httpx.post(f"{site.url}gradio_api/upload", files={"files": (name, TEXT)}).json()
    for coding in ("gzip", "br, gzip"):
        response = get(f"{site.url}gradio_api/file={path}", headers={"Accept-Encoding": coding})
        assert response.headers["content-encoding"] == "identity" and response.content == TEXT


def test_the_files_of_the_page_are_compressed(site):
    urls = [site.url + path for path in re.findall(r"assets/[\w.-]+\.(?:js|css)", get(site.url).text)]
    assert urls
    for url in [*urls, f"{site.url}theme.css", f"{site.url}robots.txt"]:
        response = get(url, headers={"Accept-Encoding": "br, gzip"})
        assert response.headers["content-encoding"] == ("gzip" if url in urls else "identity")
        assert response.content == get(url, headers={"Accept-Encoding": "identity"}).content


def test_the_head_of_a_file_is_the_same_for_everybody(site):
    (path,) = re.findall(r"assets/[\w.-]+\.js", get(site.url).text)[:1]
    plain = get(site.url + path).headers
    origin = site.url.rstrip("/")
    for _ in range(3):
        assert get(site.url + path, headers={"Origin": origin}).headers["access-control-allow-origin"] == origin
    own = {name: value for name, value in get(site.url + path).headers.items() if name != "date"}
    assert own == {name: value for name, value in plain.items() if name != "date"}
