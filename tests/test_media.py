"""Pictures come only from where the policy allows, and only as large; nothing here leaves this machine."""

import argparse
import asyncio
import base64
import io
import ipaddress
import os
import socket
import struct
import time
import zlib
from asyncio.selector_events import BaseSelectorEventLoop
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmvllm.cli.media import add_picture_arguments, add_source_arguments, media_policy
from mmvllm.fetching import is_allowed
from mmvllm.media import MediaError, MediaPolicy
from tests.helpers.requests import noise_image

NAME = "pictures.example"
PUBLIC = "93.184.216.34"
ANYWHERE = MediaPolicy(allowed_domains=("*",))


def encode(image: Image.Image, file_format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


PNG = encode(noise_image(13, 7, seed=0))


class Network:
    """What was looked up and connected to; names resolve to what a test says, and only this machine is ever reached."""

    def __init__(self):
        self.names: dict[str, list[list[str]]] = {}  # per name what each lookup gives; the last stays
        self.lookups: list[str] = []
        self.connected: list[str] = []
        self.delay = 0.0

    async def getaddrinfo(self, loop, host, port, **options):
        self.lookups.append(host)
        await asyncio.sleep(self.delay)
        if host not in self.names:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        answers = self.names[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (one, port)) for family, one in zip(families, addresses, strict=True)
        ]

    async def sock_connect(self, loop, sock, place):
        self.connected.append(place[0])
        if not ipaddress.ip_address(place[0]).is_loopback:
            raise ConnectionRefusedError
        return await SOCK_CONNECT(loop, sock, place)


SOCK_CONNECT = BaseSelectorEventLoop.sock_connect


@pytest.fixture
def network(monkeypatch) -> Network:
    made = Network()
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lambda *args, **kwargs: made.getaddrinfo(*args, **kwargs))
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", lambda *args: made.sock_connect(*args))
    return made


class Site:
    """A web server on this machine: `answers` gives for each path what is sent, or what writes it."""

    def __init__(self, answers: dict):
        self.answers, self.heads = answers, []

    async def serve(self, reader, writer):
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
            answer = self.answers[self.heads[-1].split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()


def answer(body: bytes = b"", status: str = "200 OK", length: int | None = None, **headers: str) -> bytes:
    fields = {"Content-Length": len(body) if length is None else length, **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(to: str) -> bytes:
    return answer(status="302 Found", Location=to)


def local(**changes) -> MediaPolicy:
    """Anything on 127.0.0.1 may be fetched."""
    return MediaPolicy(**{"allowed_domains": ("*",), "allowed_networks": ("127.0.0.1/32",), **changes})


def fetch(url: str, policy: MediaPolicy = ANYWHERE) -> bytes:
    return asyncio.run(policy.fetch(url))


def fetch_from(site: Site, policy: MediaPolicy, path: str = "/a.png", host: str = "127.0.0.1", scheme="http") -> bytes:
    async def main():
        async with site.running() as port:
            return await policy.fetch(f"{scheme}://{host}:{port}{path}")

    return asyncio.run(main())


# Addresses and their notations

DENIED_ADDRESSES = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *("168.63.129.16", "169.254.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192"),
    *("192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
    *("239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::808:808"),
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::169.254.169.254", "64:ff9b:1::808:808", "100::1", "2001::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:db8::1", "2002:7f00:1::"),
    *("2002:808:808::", "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd12:3456::1", "fe80::1"),
    *("febf::1", "fec0::1", "ff02::1", "ff0e::1"),
]

DENIED_HOSTS = [
    *("2130706433", "0x7f000001", "0x7F.1", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "127.1", "127.0.1", "1"),
    *("0", "127.0.0.01", "127.0.0.1.", "127.0.0.1..", "00000177.1", "256.0.0.1", "1.2.3.4.5", "4294967297"),
    *("127.0.0.0x1", "localhost.", "pictures.example.", ".", "..", ".pictures.example", "a..b", "-a.example"),
    *("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "", "good@127.0.0.1"),
    *("good.example:80@127.0.0.1", "@127.0.0.1", "127.0.0.1%2f@good.example", "127.0.0.1%00.example"),
    *("127.0.0.1\\@good.example", "good.example\\.127.0.0.1", "127%2e0%2e0%2e1", "%31%32%37.0.0.1", "loc%61lhost"),
    *("127.0.\t0.1", "127.0.0.1\n", " 127.0.0.1", "127.0.0.1\r\nX: y", "127.0.0.1\x00.example", "good.example\x7f"),
    *("\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "127\u30020\u30020\u30021", "\u24dbocalhost"),
    *("\u212alocal", "bücher.example", "good.example\u200b", "[::1%25lo]", "[fe80::1%eth0]", "[fe80::1%1]", "[::1"),
    *("::1", "[]", "[127.0.0.1]", "[::1].example", "[::ffff:127.1]", "127.0.0.1:0", "127.0.0.1:65536"),
    *("127.0.0.1:x", "127.0.0.1:", "127.0.0.1:80:80", "127.0.0.1:-1", "127.0.0.1:\uff18\uff10"),
]


@pytest.mark.parametrize("address", DENIED_ADDRESSES)
def test_an_address_that_is_not_public_is_refused(address, network):
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(MediaError, match="no public address"):
        fetch(f"http://{host}/a.png")
    assert network.connected == []


@pytest.mark.parametrize("address", DENIED_ADDRESSES)
def test_a_name_of_an_address_that_is_not_public_is_refused_and_the_address_not_told(address, network):
    network.names = {NAME: [[address]]}
    with pytest.raises(MediaError, match="no public address") as raised:
        fetch(f"https://{NAME}/a.png")
    assert address not in str(raised.value)
    assert network.connected == []


@pytest.mark.parametrize("host", DENIED_HOSTS)
def test_an_odd_notation_is_refused_and_not_even_looked_up(host, network):
    with pytest.raises(MediaError):
        fetch(f"http://{host}/a.png")
    assert network.lookups == network.connected == []


@pytest.mark.parametrize("address", ["1.1.1.1", PUBLIC, "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_a_public_address_is_connected_to(address, network):
    network.names = {NAME: [[address]]}
    with pytest.raises(MediaError, match="cannot be reached"):  # only this machine is, in these tests
        fetch(f"http://{NAME}/a.png")
    assert network.connected == [str(ipaddress.ip_address(address))]


def test_one_address_that_is_not_public_spoils_a_name(network):
    network.names = {NAME: [[PUBLIC, "10.0.0.1"]]}
    with pytest.raises(MediaError, match="no public address"):
        fetch(f"http://{NAME}/a.png")
    assert network.connected == []


def test_a_name_that_is_unknown_is_refused_like_one_that_is_not_public(network):
    network.names = {"inner.example": [["10.0.0.1"]]}
    errors = []
    for name in ("inner.example", "nobody.example"):
        with pytest.raises(MediaError) as raised:
            fetch(f"http://{name}/a.png")
        errors.append(str(raised.value).replace(name, "name"))
    assert errors[0] == errors[1]


def test_an_allowed_network_allows_no_other():
    policy = local(allowed_networks=("10.1.0.0/16", "fd00::/16"))
    allowed = ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00::5", "8.8.8.8"]
    denied = ["10.2.0.1", "127.0.0.1", "fd01::5", "::ffff:10.2.0.1"]
    verdicts = [is_allowed(ipaddress.ip_address(one), policy) for one in allowed + denied]
    assert verdicts == [True] * len(allowed) + [False] * len(denied)


def test_a_name_is_looked_up_once_and_the_checked_address_is_connected_to(network):
    network.names = {NAME: [["127.0.0.1"], ["10.0.0.1"]]}
    site = Site({"/a.png": answer(PNG)})
    assert fetch_from(site, local(), host=NAME) == PNG
    assert (network.lookups, network.connected) == ([NAME], ["127.0.0.1"])
    assert f"Host: {NAME}:" in site.heads[0]


def test_the_next_address_is_tried_if_one_cannot_be_reached(network):
    network.names = {NAME: [[PUBLIC, "127.0.0.1"]]}
    assert fetch_from(Site({"/a.png": answer(PNG)}), local(), host=NAME) == PNG
    assert network.connected == [PUBLIC, "127.0.0.1"]


# Hosts


@pytest.mark.parametrize(
    "domains, host, is_tried",
    [
        (("pictures.example",), "pictures.example", True),
        (("Pictures.Example",), "PICTURES.example", True),
        (("pictures.example",), "a.pictures.example", False),
        (("pictures.example",), "notpictures.example", False),
        (("pictures.example",), "pictures.example.evil.example", False),
        (("*.pictures.example",), "a.b.pictures.example", True),
        (("*.pictures.example",), "pictures.example", False),
        (("*.pictures.example",), "notpictures.example", False),
        (("other.example", "*"), "pictures.example", True),
        ((PUBLIC,), PUBLIC, True),
        ((PUBLIC,), "93.184.216.35", False),
        (("2606:4700::1",), "[2606:4700:0::1]", True),
    ],
)
def test_only_allowed_hosts_are_looked_up(domains, host, is_tried, network):
    network.names = {host.lower(): [[PUBLIC]]}
    with pytest.raises(MediaError, match="cannot be reached" if is_tried else "--allowed-media-domains"):
        fetch(f"http://{host}/a.png", MediaPolicy(allowed_domains=domains))
    assert bool(network.lookups) == is_tried


def test_by_default_nothing_is_fetched_or_read(network):
    for url, option in {f"http://{PUBLIC}/": "media-domains", "file:///etc/hosts": "local-media-path"}.items():
        with pytest.raises(MediaError, match=f"--allowed-{option}"):
            fetch(url, MediaPolicy())
    assert network.lookups == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/a", "gopher://a", "s3://a/b", "/etc/hosts", "a.png", "", "//a"])
def test_other_schemes_are_refused(url, network):
    with pytest.raises(MediaError, match=r"give an http\(s\):// URL or a data: URI"):
        fetch(url, local())


# Answers


def test_a_picture_is_fetched_without_proxy_or_cookies(network, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    site = Site({"/B%C3%A4r.png?a=1&b=%20": answer(PNG, Set_Cookie="a=b", Content_Type="text/html")})
    assert fetch_from(site, local(), "/Bär.png?a=1&b=%20#top") == PNG
    names = {line.partition(":")[0].lower() for line in site.heads[0].splitlines()[1:] if line}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}


@pytest.mark.parametrize("body", [b"HTTP/1.1 200 OK\r\n\r\nabc", b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabcdef"])
def test_a_body_ends_with_the_connection_or_the_announced_length(body, network):
    assert fetch_from(Site({"/a.png": body}), local()) == b"abc"


@pytest.mark.parametrize(
    "raw, message",
    [
        (answer(b"no", "404 Not Found"), "status 404"),
        (answer(b"", "204 No Content"), "status 204"),
        (answer(b"", "304 Not Modified"), "status 304"),
        (answer(b"", "302 Found"), "status 302"),
        (answer(zlib.compress(PNG), Content_Encoding="gzip"), r"compressed \(gzip\)"),
        (answer(PNG, Content_Encoding="br"), r"compressed \(br\)"),
        (answer(b"", length=1001), "too large, at most 1000 bytes"),
        (answer(b"abc", length=10), "does not answer in HTTP"),
        (answer(b"abc", length=-1), "does not answer in HTTP"),
        (answer(b"abc", Transfer_Encoding="gzip"), "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "does not answer in HTTP"),
        (b"this is not HTTP\r\n\r\n", "does not answer in HTTP"),
        (b"", "does not answer in HTTP"),
    ],
)
def test_an_answer_that_is_no_picture_is_named(raw, message, network):
    with pytest.raises(MediaError, match=message):
        fetch_from(Site({"/a.png": raw}), local(max_bytes=1000))


def test_an_endless_body_is_stopped_at_the_limit(network):
    sent = 0

    async def flood(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while sent < 100_000_000:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()
            sent += 0x10000

    with pytest.raises(MediaError, match="at most 1000000 bytes"):
        fetch_from(Site({"/a.png": flood}), local(max_bytes=1_000_000))
    assert sent < 20_000_000  # the limit and what the sockets hold


async def stall(writer):
    writer.write(answer(b"abc", length=10))
    await asyncio.sleep(30)


async def trickle(writer):
    writer.write(answer(length=1000))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "handler, limits, message",
    [
        (stall, {"read_timeout": 0.1}, "stopped answering"),
        (trickle, {"read_timeout": 2.0, "total_timeout": 0.2}, "took longer than 0.2 s"),
    ],
)
def test_a_slow_server_is_given_up(handler, limits, message, network):
    start = time.perf_counter()
    with pytest.raises(MediaError, match=message):
        fetch_from(Site({"/a.png": handler}), local(**limits))
    assert time.perf_counter() - start < 20


def test_a_slow_lookup_is_given_up(network):
    network.names, network.delay = {NAME: [[PUBLIC]]}, 5.0
    with pytest.raises(MediaError, match="did not answer in time"):
        fetch(f"http://{NAME}/", MediaPolicy(allowed_domains=("*",), connect_timeout=0.1))


def test_a_host_that_does_not_answer_is_given_up(network, monkeypatch):
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", lambda *_: asyncio.sleep(5))
    with pytest.raises(MediaError, match="did not answer in time"):
        fetch(f"http://{PUBLIC}/", MediaPolicy(allowed_domains=("*",), connect_timeout=0.1))


def test_tls_asks_for_the_name_and_not_the_address(network):
    network.names = {NAME: [["127.0.0.1"]]}
    hello = bytearray()

    class Listener(Site):
        async def serve(self, reader, writer):
            hello.extend(await reader.read(65536))
            writer.close()

    with pytest.raises(MediaError, match="valid certificate"):
        fetch_from(Listener({}), local(), host=NAME, scheme="https")
    assert hello[0] == 22 and NAME.encode() in hello


# Redirects


def chain(length: int) -> Site:
    """Relative redirects, and the picture at the end."""
    return Site({**{f"/{i}": moved(f"./{i + 1}") for i in range(length)}, f"/{length}": answer(PNG)})


def test_three_redirects_are_followed_and_a_fourth_is_not(network):
    site = chain(3)
    assert fetch_from(site, local(), "/0") == PNG
    assert len(site.heads) == 4
    site = chain(4)
    with pytest.raises(MediaError, match="redirects more than 3 times"):
        fetch_from(site, local(), "/0")
    assert len(site.heads) == 4


@pytest.mark.parametrize(
    "location, message",
    [
        ("http://10.0.0.1/secret", "no public address"),
        ("http://169.254.169.254/secret", "no public address"),
        ("http://[fd00:ec2::254]/secret", "no public address"),
        ("//127.0.0.2/secret", "no public address"),
        ("http://inner.example/secret", "no public address"),
        ("https://2130706433/secret", "not an address as it is usually written"),
        ("http://other.test/secret", "--allowed-media-domains"),
        ("http://good@127.0.0.1/secret", "no user names"),
        ("http:\\\\127.0.0.1\\secret", "backslash"),
        ("file:///etc/secret", "not a URL to fetch from"),
        ("data:image/png;base64,secret", "not a URL to fetch from"),
        ("ftp://127.0.0.1/secret", "not a URL to fetch from"),
        ("http://[secret", "not a URL"),
        ("", "redirects more than 3 times"),
    ],
)
def test_a_redirect_is_checked_like_the_first_url_and_not_told(location, message, network):
    network.names = {"inner.example": [["10.0.0.1"]]}
    domains = ("127.0.0.1", "127.0.0.2", "10.0.0.1", "169.254.169.254", "fd00:ec2::254", "*.example")
    with pytest.raises(MediaError, match=message) as raised:
        fetch_from(Site({"/a.png": moved(location)}), local(allowed_domains=domains))
    assert "secret" not in str(raised.value)
    assert set(network.connected) == {"127.0.0.1"}


def test_a_redirect_to_another_allowed_host_is_looked_up_and_followed(network):
    network.names = {NAME: [["127.0.0.1"]]}

    class Redirecting(Site):
        async def serve(self, reader, writer):
            self.answers["/a.png"] = moved(f"//{NAME}:{writer.get_extra_info('sockname')[1]}/b.png")
            await super().serve(reader, writer)

    assert fetch_from(Redirecting({"/b.png": answer(PNG)}), local()) == PNG
    assert network.lookups[-1] == NAME


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
        ("data:", "must be plain base64"),
    ],
)
def test_another_data_uri_is_refused_and_not_echoed(uri, message):
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
        *(
            "{0}/missing.png",
            "{0}/sub",
            "{0}",
            "{0}/",
            "{0}/pipe.png",
            "{0}/out.png",
            "{0}/dangling.png",
            "{0}/a.png/b",
        ),
        *(
            "{0}/up/secret.png",
            "{0}/up/missing.png",
            "{0}/../secret.png",
            "{0}/../missing.png",
            "{0}/%2e%2e/secret.png",
        ),
        *("{0}/../allowed/a.png", "{1}/secret.png", "{1}/missing.png", "{1}/in/a.png", "{0} too/secret.png"),
        *(
            "{0}%20too/secret.png",
            "/{0}/a.png",
            "{0}/%2561.png",
            "{0}/a.png%00",
            "{0}/a.png\0",
            "example.org{0}/a.png",
        ),
        *("/etc/passwd", "/proc/self/environ", "/dev/zero", "a.png", "~/a.png", "", "{0}/\ud800", "{0}/" + "a" * 5000),
    ],
)
def test_other_files_are_refused_alike_whether_there_or_not(path, folder):
    url = "file://" + path.format(folder, folder.parent)
    with pytest.raises(MediaError) as raised:
        fetch(url, MediaPolicy(allowed_local_path=folder))
    assert str(raised.value).endswith(": no such file in the allowed folder")


def test_a_file_over_the_limit_is_refused(folder):
    with pytest.raises(MediaError, match="at most 20 bytes"):
        fetch((folder / "a.png").as_uri(), MediaPolicy(allowed_local_path=folder, max_bytes=20))


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
    """Other threads open and close files elsewhere meanwhile."""
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


# Loading


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def test_a_picture_over_the_pixel_limit_is_refused_undecoded():
    with pytest.raises(ValueError, match=r"too large to decode \(.*\); shrink it first"):
        MediaPolicy().load(bomb(50_000, 50_000))
    with pytest.raises(ValueError, match=r"too large to decode \(it is 8001x8000, more than 64000000 pixels\)"):
        MediaPolicy().load(bomb(8001, 8000))
    with pytest.raises(ValueError, match="truncated"):
        MediaPolicy().load(bomb(8000, 8000))  # allowed, so it is decoded


def test_the_pixel_limit_itself_is_allowed():
    assert MediaPolicy(max_pixels=13 * 7).load(PNG).tobytes() == noise_image(13, 7, seed=0).tobytes()
    with pytest.raises(ValueError, match="13x7"):
        MediaPolicy(max_pixels=13 * 7 - 1).load(PNG)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats_of_the_web_are_loaded(file_format):
    assert MediaPolicy().load(encode(noise_image(20, 10, seed=1), file_format)).size == (20, 10)


@pytest.mark.parametrize("file_format", ["BMP", "TIFF", "ICO", "PPM", "EPS", "TGA"])
def test_other_formats_are_refused_with_those_that_are_taken(file_format):
    with pytest.raises(ValueError, match="not a picture in PNG, JPEG"):
        MediaPolicy().load(encode(noise_image(20, 10, seed=1), file_format))


def test_bytes_over_the_limit_are_refused():
    with pytest.raises(MediaError, match=f"at most {len(PNG) - 1} bytes"):
        MediaPolicy(max_bytes=len(PNG) - 1).load(PNG)


@pytest.mark.parametrize("source", [Path(__file__), __file__, f"file://{__file__}", "http://127.0.0.1/a.png", 7])
def test_a_path_that_a_stranger_may_have_chosen_is_never_read(source):
    with pytest.raises(MediaError, match="must come as its bytes, not as"):
        MediaPolicy().load(source)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_domains": "example.org"}, "allowed_domains is one string"),
        ({"allowed_networks": "10.0.0.0/8"}, "allowed_networks is one string"),
        ({"max_bytes": 0}, "max_bytes is 0, must be above 0"),
        ({"total_timeout": -1}, "total_timeout is -1, must be above 0"),
        ({"max_redirects": -1}, "max_redirects is -1, must be at least 0"),
    ],
)
def test_limits_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MediaPolicy(**given)


# Options


def parsed(*arguments: str) -> MediaPolicy:
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    add_picture_arguments(parser)
    return media_policy(parser.parse_args(arguments))


def test_options_make_the_policy_they_say(tmp_path):
    assert parsed() == MediaPolicy()
    options = ("--allowed-media-domains", "a.example, *.b.example", "--allowed-media-networks", "10.1.0.0/16,fd00::/8")
    limits = ("--max-image-bytes", "10", "--max-image-pixels", "20", "--allowed-local-media-path", str(tmp_path))
    assert parsed(*options, *limits) == MediaPolicy(
        ("a.example", "*.b.example"), ("10.1.0.0/16", "fd00::/8"), tmp_path, max_bytes=10, max_pixels=20
    )


@pytest.mark.parametrize(
    "option, value",
    [
        *(
            ("--allowed-media-domains", one)
            for one in ("https://a.example", "a.example:80", "a*.example", "[::1]", "::01")
        ),
        *(("--allowed-media-networks", one) for one in ("a.example", "10.0.0.1/8", "10.0.0.0/33")),
        ("--allowed-local-media-path", "/no/such/folder"),
        ("--max-image-pixels", "1000000000"),
    ],
)
def test_an_option_that_cannot_be_is_named(option, value):
    with pytest.raises(ValueError, match=option):
        parsed(option, value)


# Anything

PIECES = [
    *("http://", "https://", "HTTP:", "//", "///", "/", "\\", ":", "@", ".", "..", "%", "%00", "%2e", "?", "#"),
    *("[", "]", "[::1]", "[::ffff:7f00:1]", "127.0.0.1", "10.0.0.1", "0x7f", "0177", "1", "2130706433", ":80"),
    *(":0", "localhost", "pictures.example", "\xe9", "\uff11", "\u3002", "\u017f", "file:", "file:///", "data:"),
    *(";base64,", ",", "AAAA", "=", "~", "../", "etc/passwd", "user:pw@", " ", "\t", "\r\n", "\x00", "\u2028", ""),
    *("\ud800",),
]
PARTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=8).map("".join)
URLS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["http://", "https://", "file:///", "data:image/png;base64,", ""]),
    st.sampled_from(["", "pictures.example", "pictures.example/", "localhost:80"]),
    PARTS,
)


def test_whatever_the_url_it_is_bytes_or_a_media_error_and_only_public_addresses_are_connected_to(network, tmp_path):
    network.names = {NAME: [[PUBLIC]], "localhost": [["127.0.0.1"]]}
    policy = MediaPolicy(allowed_domains=("*",), allowed_local_path=tmp_path)

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(URLS)
    def holds(url):
        with suppress(MediaError):
            assert isinstance(fetch(url, policy), bytes)
        assert all(is_allowed(ipaddress.ip_address(one), ANYWHERE) for one in network.connected)

    holds()
    assert PUBLIC in network.connected
