"""Images come from data URIs, allowed folders and allowed hosts, or there is a MediaError."""

import base64
import ipaddress
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.media.http_fetching import is_allowed
from mmvllm.media.policy import MediaError, MediaPolicy
from tests.helpers.serving.web import ANYWHERE, NAME, PNG, PUBLIC, fetch, local


def test_by_default_nothing_is_fetched_or_read(network):
    for url, field in {f"http://{PUBLIC}/": "domains", "file:///etc/hosts": "local_path"}.items():
        with pytest.raises(MediaError, match=f"allowed_{field}"):
            fetch(url, MediaPolicy())
    assert network.lookups == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/a", "gopher://a", "s3://a/b", "/etc/hosts", "a.png", "", "//a"])
def test_other_schemes_are_refused(url, network):
    with pytest.raises(MediaError, match=r"give an http\(s\):// URL, or base64 as data:image/png;base64,<data>"):
        fetch(url, local())


@pytest.mark.parametrize("url", ["https://user:hidden@example.org/a.png", "ftp://user:hidden@example.org/a.png"])
def test_a_login_is_not_shown(url, network):
    with pytest.raises(MediaError, match=r"//example\.org/a\.png") as refused:
        fetch(url, ANYWHERE)
    assert "hidden" not in str(refused.value) and not network.lookups


@pytest.mark.spawns
def test_the_http_client_is_imported_only_when_a_host_is_allowed():
    code = """
import asyncio, sys
sys.modules["mmvllm.media.http_fetching"] = None
from mmvllm.media.fetching import fetch
from mmvllm.media.policy import MediaPolicy
print(asyncio.run(fetch("data:;base64,aGVsbG8=", MediaPolicy())))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "b'hello'\n"


# Data URIs


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("size", [0, 1, 98, 99, 100])
def test_a_data_uri_up_to_the_limit_is_decoded(size):
    assert fetch(data_uri(bytes(size)), MediaPolicy(max_bytes=100)) == bytes(size)


def test_a_wrapped_data_uri_is_decoded():
    assert fetch("DATA:image/png;BASE64,\n" + base64.encodebytes(PNG).decode()) == PNG


@pytest.mark.parametrize(
    "uri, message",
    [
        (data_uri(bytes(200)), "at most 100 bytes"),
        ("data:image/png;base64," + " " * 200, "at most 100 bytes"),
        ("data:image/png;base64,iVBO*Rw0", "not valid base64"),
        ("data:image/png;base64,\ud800", "not valid base64"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,aa%3D%3D", "must be plain base64"),
        ("data:image/png,hello", "must be plain base64"),
    ],
)
def test_an_invalid_data_uri_is_refused_and_not_echoed(uri, message):
    with pytest.raises(MediaError, match=message) as raised:
        fetch(uri, MediaPolicy(max_bytes=100))
    assert len(str(raised.value)) < 200


# Files


@pytest.fixture
def folder(tmp_path) -> Path:
    """An allowed folder, with a secret beside it."""
    inside = tmp_path / "allowed"
    (inside / "sub").mkdir(parents=True)
    for path in (inside / "a.png", inside / "sub" / "50% ä.png", tmp_path / "secret.png"):
        path.write_bytes(PNG)
    (tmp_path / "allowed too").mkdir()
    (tmp_path / "allowed too" / "secret.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(inside / "sub" / "50% ä.png")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "dangling.png").symlink_to(tmp_path / "missing.png")
    (inside / "up").symlink_to(tmp_path)
    (tmp_path / "in").symlink_to(inside)
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize("name", ["a.png", "sub/50% ä.png", "link.png"])
def test_a_file_in_the_allowed_folder_is_read(name, folder):
    policy = MediaPolicy(allowed_local_path=folder)
    assert fetch((folder / name).as_uri(), policy) == PNG
    assert fetch((folder / name).as_uri().replace("file://", "FILE://localhost"), policy) == PNG


def test_an_allowed_folder_may_be_a_link(folder):
    linked = folder.parent / "in"
    assert fetch((linked / "a.png").as_uri(), MediaPolicy(allowed_local_path=linked)) == PNG


@pytest.mark.parametrize(
    "path",
    [
        *("{0}/missing.png", "{0}/sub", "{0}", "{0}/pipe.png", "{0}/out.png", "{0}/dangling.png", "{0}/a.png/b"),
        *("{0}/up/secret.png", "{0}/up/missing.png", "{0}/../secret.png", "{0}/../missing.png"),
        *("{0}/%2e%2e/secret.png", "{0}/../allowed/a.png", "{0}/a.png/", "{0}/a.png/.", "{0}/link.png/"),
        *("{1}/secret.png", "{1}/missing.png", "{1}/in/a.png", "{0} too/secret.png", "/{0}/a.png"),
        *("{0}/%2561.png", "{0}/a.png%00", "example.org{0}/a.png", "/etc/passwd", "/dev/zero", "a.png", ""),
        *("{0}/\ud800", "{0}/" + "a" * 5000),
    ],
)
def test_other_files_are_refused_alike_whether_they_exist_or_not(path, folder):
    url = "file://" + path.format(folder, folder.parent)
    with pytest.raises(MediaError) as raised:
        fetch(url, MediaPolicy(allowed_local_path=folder))
    assert str(raised.value).endswith(": no such file in the allowed folder")


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_a_folder_that_becomes_a_link_while_it_is_checked_is_not_followed(folder, monkeypatch):
    realpath = os.path.realpath

    def swap(path, **options):
        real = realpath(path, **options)
        if "sub" in str(path) and not (folder / "old").exists():
            (folder / "sub").rename(folder / "old")
            (folder / "sub").symlink_to(folder.parent)
        return real

    monkeypatch.setattr(os.path, "realpath", swap)
    (folder / "sub" / "secret.png").write_bytes(b"harmless")
    with pytest.raises(MediaError, match="no such file"):
        fetch((folder / "sub" / "secret.png").as_uri(), MediaPolicy(allowed_local_path=folder))
    assert (folder / "sub").is_symlink()


def open_below(folder: Path) -> list[str]:
    """The open files below a folder; other threads may open and close files elsewhere."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


def test_a_refused_file_leaves_nothing_open(folder):
    with open(folder / "a.png", "rb"):
        assert open_below(folder.parent) == [str(folder / "a.png")]
    for name in ("", "sub", "pipe.png", "sub/missing.png", "out.png"):
        with pytest.raises(MediaError):
            fetch(f"file://{folder}/{name}", MediaPolicy(allowed_local_path=folder))
    assert open_below(folder.parent) == []


# Random URLs

PIECES = [
    *("http://", "https://", "HTTP:", "//", "///", "/", "\\", ":", "@", ".", "..", "%", "%00", "%2e", "?", "#"),
    *("[", "]", "[::1]", "[::ffff:7f00:1]", "127.0.0.1", "10.0.0.1", "0x7f", "0177", "1", "2130706433", ":80"),
    *(":0", "localhost", "images.example", "\xe9", "\uff11", "\u3002", "\u017f", "file:", "file:///", "data:"),
    *(";base64,", ",", "AAAA", "=", "~", "../", "etc/passwd", "user:pw@", " ", "\t", "\r\n", "\x00", "\u2028", ""),
    *("\ud800",),
]
PARTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=8).map("".join)
URLS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["http://", "https://", "file:///", "data:image/png;base64,", ""]),
    st.sampled_from(["", "images.example", "images.example/", "localhost:80"]),
    PARTS,
)


@pytest.mark.slow
def test_any_url_gives_bytes_or_a_media_error_and_only_public_addresses_are_connected_to(network, tmp_path):
    network.names = {NAME: [[PUBLIC]], "localhost": [["127.0.0.1"]]}
    policy = MediaPolicy(allowed_domains=("*",), allowed_local_path=tmp_path)

    @settings(max_examples=400)
    @given(URLS)
    def holds(url):
        with suppress(MediaError):
            assert isinstance(fetch(url, policy), bytes)
        assert all(is_allowed(ipaddress.ip_address(one), ANYWHERE) for one in network.connected)

    holds()
    assert PUBLIC in network.connected


# Videos


def test_a_video_has_a_limit_of_its_own(folder):
    size, policy = len(PNG), {"max_bytes": 10, "allowed_local_path": folder}
    file, data = (folder / "a.png").as_uri(), data_uri(PNG).replace("image/png", "video/mp4")
    for url in (file, data):
        assert fetch(url, MediaPolicy(max_video_bytes=size, **policy), "video") == PNG
        with pytest.raises(MediaError, match="at most 10 bytes are accepted; shrink it") as caught:
            fetch(url, MediaPolicy(max_video_bytes=size, **policy))
        assert caught.value.field == "max_bytes"
        with pytest.raises(MediaError, match=r"at most 60 bytes are accepted; shrink it") as caught:
            fetch(url, MediaPolicy(max_video_bytes=60, **policy), "video")
        assert caught.value.field == "max_video_bytes"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://{PUBLIC}/a.mp4", "this server fetches no URLs; send the video as a data: URI"),
        ("file:///a.mp4", "this server reads no file:// URLs; send the video as a data: URI"),
        ("ftp://a/b.mp4", r"not a URL of a video; give an http\(s\):// URL"),
        ("data:video/mp4,abc", "must be plain base64; write data:video/mp4;base64,<data>"),
    ],
)
def test_messages_speak_of_a_video(url, message):
    with pytest.raises(MediaError, match=message):
        fetch(url, MediaPolicy(), "video")
