"""A download ends in time, whatever its host does."""

import base64
import io
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from mmvllm.errors import ImageError, VideoError
from mmvllm.processors import download as download_module
from mmvllm.processors.download import download, without_login
from mmvllm.processors.images.load import load_image
from mmvllm.processors.videos.load import load_video_info
from tests.helpers.media.images import PNG
from tests.helpers.serving.drips import DRIPS, HEAD, Host

pytestmark = pytest.mark.network


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    """Hosts that are closed after the test."""
    with ExitStack() as stack:
        yield lambda *args: stack.enter_context(closing(Host(*args)))


@pytest.fixture
def host(request, monkeypatch, make_host) -> Host:
    monkeypatch.setattr(download_module, "DOWNLOAD_SECONDS", 0.4)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return make_host(getattr(request, "param", ""))


def redirecting(path: str) -> str:
    return f"HTTP/1.1 302 Found\r\nLocation: {path}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def assert_ends_in_time(load, url: str) -> None:
    begin = time.monotonic()
    with pytest.raises(
        ValueError, match=r"cannot be fetched \(not complete after 0\.4 s plus a second for each megabyte\)"
    ):
        load(url)
    assert time.monotonic() - begin < 10  # far below the 20 s without a byte


@pytest.mark.parametrize("host", DRIPS.values(), ids=DRIPS, indirect=True)
def test_a_host_that_sends_a_byte_now_and_then(host):
    assert_ends_in_time(load_image, f"{host.url}/a.png")


@pytest.mark.parametrize("host", [DRIPS["a body of known length"]], indirect=True)
def test_a_video(host):
    pytest.importorskip("av")
    assert_ends_in_time(load_video_info, f"{host.url}/a.mp4")


@pytest.mark.parametrize("host", ["HTTP/1.1 200 "], indirect=True)
def test_a_proxy(host, monkeypatch):
    monkeypatch.setenv("https_proxy", host.url)
    assert_ends_in_time(load_image, "https://example.invalid/a.png")


def test_redirects_that_never_end_their_heads(host, make_host):
    other = make_host(redirecting(f"{host.url}/b.png"))
    assert_ends_in_time(load_image, f"{other.url}/a.png")


def test_a_redirect_to_ftp_is_not_followed(host, make_host):
    other = make_host(redirecting(f"{host.url.replace('http', 'ftp')}/b.png"))
    with pytest.raises(ImageError, match="a redirect to an ftp:// URL is not followed"):
        load_image(f"{other.url}/a.png")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_the_body_of_a_redirect_is_not_read(host, code, make_host):
    """It would be in memory as a whole, however long it is."""
    target = make_host(f"{HEAD}Content-Length: {len(PNG)}\r\n\r\n" + "a" * len(PNG), b"")
    head = f"HTTP/1.1 {code} Moved\r\nLocation: {target.url}/b.png\r\nConnection: close\r\n\r\n"
    other, file = make_host(head, b"x" * 10**6), io.BytesIO()
    download(f"{other.url}/a.png", file, 1000 * len(PNG), ImageError)
    assert file.getvalue() == b"a" * len(PNG)


def test_a_body_that_ends_early_is_an_error(make_host):
    host, file = make_host(f"{HEAD}Content-Length: 40\r\n\r\n" + "a" * 25), io.BytesIO()
    host.is_over.set()  # it closes the connection
    with pytest.raises(ImageError, match=r"the connection ended after 25 bytes, short of the announced length"):
        download(f"{host.url}/a.png", file, 1000, ImageError)


def test_all_addresses_of_a_host_share_the_time(monkeypatch):
    """A listener whose queue is full answers nothing, as a host that is down."""
    monkeypatch.setattr(download_module, "DOWNLOAD_SECONDS", 0.4)
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        dead = (socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *_, **__: [dead] * (50 if host == "many.example" else 1)
        )
        monkeypatch.setenv("no_proxy", "many.example")
        begin = time.monotonic()
        with pytest.raises(ImageError, match="cannot be fetched"):
            load_image("http://many.example/a.png")
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("length", [f"Content-Length: {len(PNG)}", "Connection: close"])
def test_what_arrives_in_time_is_whole(length, monkeypatch, make_host):
    monkeypatch.setattr(download_module, "DOWNLOAD_SECONDS", 60.0)
    host, file = make_host(f"{HEAD}{length}\r\n\r\n" + "a" * len(PNG), b""), io.BytesIO()
    host.is_over.set()
    download(f"{host.url}/a.png", file, 1000 * len(PNG), ImageError)
    assert file.getvalue() == b"a" * len(PNG)
    assert "mmvllm-download" not in {thread.name for thread in threading.enumerate() if not thread.daemon}


def test_every_megabyte_gives_another_second(monkeypatch, make_host):
    monkeypatch.setattr(download_module, "DOWNLOAD_SECONDS", 0.3)
    monkeypatch.setattr(download_module, "BYTES_PER_SECOND", 10)
    host, file = make_host(f"{HEAD}Content-Length: 40\r\n\r\n" + "a" * 25), io.BytesIO()  # then 0.75 s for 15 bytes
    download(f"{host.url}/a.png", file, 1000, ImageError)
    assert file.getvalue() == b"a" * 25 + b"0" * 15


@pytest.mark.parametrize("login", ["user:hidden", "user:hid%2Fden%40", "hidden-token", "user:hid@den"])
def test_a_login_is_sent_to_the_host_of_its_url_alone_and_shown_in_no_message(login, caplog, make_host):
    target = make_host(f"{HEAD}Content-Length: 3\r\n\r\n", b"a")
    first = make_host(redirecting(f"{target.url}/b.png"))
    for load in (load_image, load_video_info):
        with pytest.raises((ImageError, VideoError)) as refused:
            load(f"{first.url.replace('://', f'://{login}@')}/a.png")
        assert "hid" not in str(refused.value) + caplog.text and f"{first.url}/a.png: " in str(refused.value)
    user, _, password = urllib.parse.unquote(login).partition(":")
    want = base64.b64encode(f"{user}:{password}".encode()).decode()
    assert all(f"Authorization: Basic {want}\r\n" in head for head in first.heads) and len(first.heads) == 2
    assert not any("Authorization" in head for head in target.heads) and len(target.heads) == 2


def test_a_login_is_sent_again_after_a_redirect_to_the_same_host(make_host):
    host = make_host([redirecting("/b.png"), f"{HEAD}Content-Length: 3\r\n\r\n"], b"a")
    download(f"{host.url.replace('://', '://user:hidden@')}/a.png", io.BytesIO(), 1000, ImageError)
    assert [head.splitlines()[0] for head in host.heads] == ["GET /a.png HTTP/1.1", "GET /b.png HTTP/1.1"]
    assert all("Authorization: Basic dXNlcjpoaWRkZW4=\r\n" in head for head in host.heads)


def test_the_login_of_a_proxy_is_not_sent_to_a_host(monkeypatch, make_host):
    target = make_host(f"{HEAD}Content-Length: 3\r\n\r\n", b"a")
    proxy = make_host(redirecting(f"{target.url}/b.png"))
    monkeypatch.setenv("http_proxy", proxy.url.replace("://", "://user:hidden@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    download("http://images.example/a.png", io.BytesIO(), 1000, ImageError)
    assert "Proxy-Authorization: Basic dXNlcjpoaWRkZW4=\r\n" in proxy.heads[0] and len(proxy.heads) == 1
    assert "uthorization" not in target.heads[0] and len(target.heads) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hid/den@127.0.0.1:1/a.png",
        "http://user:hid?den@127.0.0.1/a.png",
        "http://user:hidden@host:port/a.png",
        "http://user:hidden@[::1/a.png",
        "http://user:hidden@/a.png",
        "http://user:hidden@127.0.0.1:1/a@2x.png",
    ],
)
def test_a_login_in_a_url_that_cannot_be_fetched_is_not_shown(url):
    with pytest.raises(ImageError, match=r"http://\S+\.png: cannot be fetched \(.+\)") as refused:
        load_image(url)
    assert "hid" not in str(refused.value) and "den" not in str(refused.value)


@pytest.mark.parametrize("load", [load_image, load_video_info])
def test_a_login_in_a_url_of_another_scheme_is_not_shown(load):
    with pytest.raises((ImageError, VideoError), match=r"from svn\+ssh://host/a\.png; give"):
        load("svn+ssh://user:hidden@host/a.png")


@pytest.mark.parametrize("rest", ["fetch/http://a:b@example.org/a.png", "?from=http://a@example.org/a.png", "a@2x.png"])
def test_a_login_is_only_what_stands_before_the_host(rest, make_host):
    host = make_host(f"{HEAD}Content-Length: 3\r\n\r\n", b"a")
    download(f"{host.url}/{rest}", io.BytesIO(), 1000, ImageError)
    assert without_login(f"{host.url}/{rest}") == f"{host.url}/{rest}"
    assert host.heads[0].startswith(f"GET /{rest} HTTP/1.1\r\n") and "Authorization" not in host.heads[0]


@pytest.mark.parametrize("scheme", ["http://", "https://", "http:/", "HTTP:", "http:\\\\", "s3://"])
def test_a_login_is_not_shown_where_a_url_is_mistyped(scheme):
    assert without_login(f"{scheme}user:pass@host/a@b.png") == f"{scheme}host/a@b.png"
    assert without_login("me:a@b.png") == "me:a@b.png"  # the name of a file


def test_logins_are_found_in_linear_time():
    begin = time.thread_time()
    for part in (":", "@", "a:", "/"):
        without_login("http://" + part * 10**6)
        without_login("http:" + part * 10**6)
    assert time.thread_time() - begin < 2


LONG = "a" * 65_000
REASONS = {
    "reason": f"HTTP/1.1 404 {LONG}\r\nContent-Length: 0\r\n\r\n",
    "status line": f"{LONG}\r\n\r\n",
    "redirect": f"HTTP/1.1 302 Found\r\nLocation: foo://{LONG}\r\nContent-Length: 0\r\n\r\n",
    "login": f"HTTP/1.1 404 {'b ' * 140}x:hidden{LONG}@\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", REASONS.values(), ids=REASONS)
def test_a_long_reason_of_a_host_is_cut_off_before_logins_are_looked_for_in_it(answer, monkeypatch, make_host):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    host = make_host(answer)
    begin = time.thread_time()
    with pytest.raises(ImageError) as failed:
        download(f"{host.url}/a.png", io.BytesIO(), 1000, ImageError)
    assert len(str(failed.value)) < 500 and "hidden" not in str(failed.value)
    assert time.thread_time() - begin < 2  # 65,000 ** 2 steps take longer


LOGIN = "dXNlcjpoaWRkZW4= user:hidden"


@pytest.mark.parametrize("answer", [f"HTTP/1.1 407 {LOGIN}\r\nContent-Length: 0\r\n\r\n", f"{LOGIN}\r\n\r\n"])
@pytest.mark.parametrize("kind", ["host", "proxy", "tunnel"])
def test_a_login_that_a_host_or_a_proxy_repeats_is_not_shown(answer, kind, monkeypatch, make_host):
    host = make_host(answer)
    url = host.url.replace("://", "://user:hidden@")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    if kind != "host":
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("https_proxy", url)
        url = "http://images.example" if kind == "proxy" else "https://images.example"
    with pytest.raises(ImageError, match="cannot be fetched") as refused:
        load_image(f"{url}/a.png")
    assert len(host.heads) == 1 and "hidden" not in str(refused.value) and "dXNl" not in str(refused.value)


@pytest.mark.parametrize(
    "proxy",
    [
        *("http:/user:hidden@host", "user:hidden@host:port", "http://user:hidden@127.0.0.1:1"),
        *("user:hidden", "http://user:hidden word", "http://user:hidden"),
    ],
)
def test_the_login_of_a_proxy_is_not_shown(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ImageError, match="cannot be fetched") as refused:
        load_image("http://images.example/a.png")
    assert "hidden" not in str(refused.value)
