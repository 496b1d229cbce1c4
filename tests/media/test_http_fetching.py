"""Images are fetched over HTTP only from allowed hosts with checked addresses; nothing here leaves this machine."""

import asyncio
import base64
import ipaddress
import socket
import threading
import time
import zlib
from asyncio.selector_events import BaseSelectorEventLoop

import pytest

from mmvllm.media import http_fetching
from mmvllm.media.fetching import fetch as fetch_media
from mmvllm.media.http_fetching import is_allowed
from mmvllm.media.policy import MediaError, MediaPolicy
from tests.helpers.engine.async_engines import async_test
from tests.helpers.serving.web import (
    ANYWHERE,
    NAME,
    PNG,
    PUBLIC,
    StubServer,
    answer,
    fetch,
    fetch_from,
    local,
    moved,
)

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
    *("2130706433", "0x7f000001", "0x7F.1", "0177.0.0.1", "127.1", "0", "127.0.0.01", "127.0.0.0x1", "256.0.0.1"),
    *("1.2.3.4.5", "4294967297", "127.0.0.1.", "localhost.", ".", "..", ".images.example", "a..b", "-a.example"),
    *("a" * 64, "", "good@127.0.0.1", "good.example:80@127.0.0.1", "@127.0.0.1", "127.0.0.1%2f@good.example"),
    *("127.0.0.1%00.example", "127.0.0.1\\@good.example", "127%2e0%2e0%2e1", "loc%61lhost", "127.0.\t0.1"),
    *("127.0.0.1\n", " 127.0.0.1", "127.0.0.1\r\nX: y", "127.0.0.1\x00.example", "good.example\x7f"),
    *("\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u212alocal", "bücher.example", "[fe80::1%eth0]"),
    *("[::1", "::1", "[]", "[127.0.0.1]", "[::1].example", "[::ffff:127.1]", "127.0.0.1:0", "127.0.0.1:65536"),
    *("127.0.0.1:", "127.0.0.1:80:80", "127.0.0.1:-1", "127.0.0.1:\uff18\uff10"),
]


@pytest.mark.parametrize("address", DENIED_ADDRESSES)
def test_an_address_that_is_not_public_is_refused(address, network):
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(MediaError, match="no public address"):
        fetch(f"http://{host}/a.png")
    assert network.connected == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:10.0.0.1"], [PUBLIC, "10.0.0.1"]])
def test_a_name_with_a_private_address_is_refused_and_the_address_not_revealed(addresses, network):
    network.names = {NAME: [addresses]}
    with pytest.raises(MediaError, match="no public address") as raised:
        fetch(f"https://{NAME}/a.png")
    assert addresses[-1] not in str(raised.value)
    assert network.connected == []


@pytest.mark.parametrize("host", DENIED_HOSTS)
def test_a_noncanonical_notation_is_refused_without_a_lookup(host, network):
    with pytest.raises(MediaError):
        fetch(f"http://{host}/a.png")
    assert network.lookups == network.connected == []


@pytest.mark.parametrize("address", ["1.1.1.1", PUBLIC, "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_a_public_address_is_connected_to(address, network):
    network.names = {NAME: [[address]]}
    with pytest.raises(MediaError, match="cannot be reached"):  # only this machine is, in these tests
        fetch(f"http://{NAME}/a.png")
    assert network.connected == [str(ipaddress.ip_address(address))]


def test_an_unknown_name_is_refused_like_a_private_one(network):
    network.names = {"inner.example": [["10.0.0.1"]]}
    errors = []
    for name in ("inner.example", "unknown.example"):
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


@pytest.mark.network
def test_a_name_is_looked_up_once_and_the_checked_address_is_connected_to(network):
    network.names = {NAME: [["127.0.0.1"], ["10.0.0.1"]]}
    site = StubServer({"/a.png": answer(PNG)})
    assert fetch_from(site, local(), host=NAME) == PNG
    assert (network.lookups, network.connected) == ([NAME], ["127.0.0.1"])
    assert f"Host: {NAME}:" in site.heads[0]


@pytest.mark.network
def test_the_next_address_is_tried_if_one_cannot_be_reached(network):
    network.names = {NAME: [[PUBLIC, "127.0.0.1"]]}
    assert fetch_from(StubServer({"/a.png": answer(PNG)}), local(), host=NAME) == PNG
    assert network.connected == [PUBLIC, "127.0.0.1"]


# Hosts


@pytest.mark.parametrize(
    "domains, host, is_tried",
    [
        (("images.example",), "images.example", True),
        (("Images.Example",), "IMAGES.example", True),
        (("images.example",), "a.images.example", False),
        (("images.example",), "images.example.evil.example", False),
        (("*.images.example",), "a.b.images.example", True),
        (("*.images.example",), "images.example", False),
        (("*.images.example",), "notimages.example", False),
        (("other.example", "*"), "images.example", True),
        ((PUBLIC,), PUBLIC, True),
        ((PUBLIC,), "93.184.216.35", False),
        (("2606:4700::1",), "[2606:4700:0::1]", True),
    ],
)
def test_only_allowed_hosts_are_looked_up(domains, host, is_tried, network):
    network.names = {host.lower(): [[PUBLIC]]}
    with pytest.raises(MediaError, match="cannot be reached" if is_tried else "allowed_domains"):
        fetch(f"http://{host}/a.png", MediaPolicy(allowed_domains=domains))
    assert bool(network.lookups) == is_tried


# Responses


@pytest.mark.network
def test_an_image_is_fetched_without_proxy_or_cookies(network, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    site = StubServer({"/B%C3%A4r.png?a=1&b=%20": answer(PNG, Set_Cookie="a=b", Content_Type="text/html")})
    assert fetch_from(site, local(), "/Bär.png?a=1&b=%20#top") == PNG
    names = {line.partition(":")[0].lower() for line in site.heads[0].splitlines()[1:] if line}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}


@pytest.mark.network
@pytest.mark.parametrize("body", [b"HTTP/1.1 200 OK\r\n\r\nabc", b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabcdef"])
def test_a_body_ends_with_the_connection_or_the_announced_length(body, network):
    assert fetch_from(StubServer({"/a.png": body}), local()) == b"abc"


@pytest.mark.network
@pytest.mark.parametrize(
    "raw, message",
    [
        (answer(b"no", "404 Not Found"), "status 404"),
        (answer(b"", "204 No Content"), "status 204"),
        (answer(b"", "302 Found"), "status 302"),
        (answer(zlib.compress(PNG), Content_Encoding="gzip"), r"compressed \(gzip\)"),
        (answer(b"", length=1001), "too large; at most 1000 bytes"),
        (answer(b"abc", length=10), "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "does not answer in HTTP"),
        (b"this is not HTTP\r\n\r\n", "does not answer in HTTP"),
        (b"", "does not answer in HTTP"),
    ],
)
def test_an_invalid_response_is_named(raw, message, network):
    with pytest.raises(MediaError, match=message):
        fetch_from(StubServer({"/a.png": raw}), local(max_bytes=1000))


@pytest.mark.network
def test_a_video_has_a_limit_of_its_own(network):
    site = StubServer({"/a.png": answer(bytes(500))})
    assert fetch_from(site, local(max_bytes=10, max_video_bytes=500), kind="video") == bytes(500)
    assert "Accept: video/*" in site.heads[0]
    for raw in (answer(bytes(500)), b"HTTP/1.1 200 OK\r\n\r\n" + bytes(500)):
        with pytest.raises(MediaError, match="too large; at most 499 bytes are accepted") as caught:
            fetch_from(StubServer({"/a.png": raw}), local(max_video_bytes=499), kind="video")
        assert caught.value.field == "max_video_bytes"


@pytest.mark.network
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
        fetch_from(StubServer({"/a.png": flood}), local(max_bytes=1_000_000))
    assert sent < 20_000_000  # the limit and what the sockets hold


@pytest.mark.network
def test_a_body_of_tiny_chunks_is_refused(network):
    async def blast(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000)

    with pytest.raises(MediaError, match="comes in more than 4096 chunks of less than 64 bytes"):
        fetch_from(StubServer({"/a.png": blast}), local())


def test_urls_are_fetched_beside_the_event_loop_of_the_server(network, monkeypatch):
    """A host that sends what takes long to read keeps only downloads waiting."""
    threads = []

    async def look_up(*_):
        threads.append(threading.current_thread().name)
        return []

    monkeypatch.setattr(http_fetching, "look_up", look_up)
    with pytest.raises(MediaError, match="no public address"):
        fetch(f"http://{NAME}/", ANYWHERE)
    assert threads == ["mmvllm-fetch"]


async def stall(writer):
    writer.write(answer(b"abc", length=10))
    await asyncio.sleep(30)


async def trickle(writer):
    writer.write(answer(length=1000))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.network
@pytest.mark.parametrize(
    "handler, limits, message",
    [
        (stall, {"read_timeout": 0.1}, "stopped answering"),
        (trickle, {"read_timeout": 2.0, "total_timeout": 0.2}, "took longer than 0.2 s"),
    ],
)
def test_a_slow_server_times_out(handler, limits, message, network):
    start = time.perf_counter()
    with pytest.raises(MediaError, match=message):
        fetch_from(StubServer({"/a.png": handler}), local(**limits))
    assert time.perf_counter() - start < 20


def test_a_slow_lookup_times_out(network):
    network.names, network.delay = {NAME: [[PUBLIC]]}, 5.0
    with pytest.raises(MediaError, match="did not answer in time"):
        fetch(f"http://{NAME}/", MediaPolicy(allowed_domains=("*",), connect_timeout=0.1))


@async_test
async def test_names_that_do_not_resolve_hold_nothing_that_data_uris_need(monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_end.wait(30) and [])
    lookups = [asyncio.create_task(fetch_media(f"http://{NAME}/{i}", ANYWHERE)) for i in range(40)]
    await asyncio.sleep(0)
    try:
        uri = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        assert await asyncio.wait_for(fetch_media(uri, ANYWHERE), 20) == PNG
    finally:
        may_end.set()
    assert {type(error) for error in await asyncio.gather(*lookups, return_exceptions=True)} == {MediaError}


def test_a_host_that_does_not_answer_times_out(network, monkeypatch):
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", lambda *_: asyncio.sleep(5))
    with pytest.raises(MediaError, match="did not answer in time"):
        fetch(f"http://{PUBLIC}/", MediaPolicy(allowed_domains=("*",), connect_timeout=0.1))


@pytest.mark.network
def test_tls_uses_the_name_and_not_the_address(network):
    network.names = {NAME: [["127.0.0.1"]]}
    hello = bytearray()

    class Listener(StubServer):
        async def serve(self, reader, writer):
            hello.extend(await reader.read(65536))
            writer.close()

    with pytest.raises(MediaError, match="valid certificate"):
        fetch_from(Listener({}), local(), host=NAME, scheme="https")
    assert hello[0] == 22 and NAME.encode() in hello


# Redirects


def chain(length: int) -> StubServer:
    """Relative redirects, and the image at the end."""
    return StubServer({**{f"/{i}": moved(f"./{i + 1}") for i in range(length)}, f"/{length}": answer(PNG)})


@pytest.mark.network
def test_three_redirects_are_followed_and_a_fourth_is_not(network):
    site = chain(3)
    assert fetch_from(site, local(), "/0") == PNG
    assert len(site.heads) == 4
    site = chain(4)
    with pytest.raises(MediaError, match="redirects more than 3 times"):
        fetch_from(site, local(), "/0")
    assert len(site.heads) == 4


@pytest.mark.network
@pytest.mark.parametrize(
    "location, message",
    [
        ("http://10.0.0.1/secret", "no public address"),
        ("http://[fd00:ec2::254]/secret", "no public address"),
        ("//127.0.0.2/secret", "no public address"),
        ("http://inner.example/secret", "no public address"),
        ("https://2130706433/secret", "not an address in the usual notation"),
        ("http://other.test/secret", "allowed_domains"),
        ("http://good@127.0.0.1/secret", "no user names"),
        ("http:\\\\127.0.0.1\\secret", "backslash"),
        ("file:///etc/secret", "not a URL to fetch from"),
        ("data:image/png;base64,secret", "not a URL to fetch from"),
        ("http://[secret", "not a URL"),
        ("", "redirects more than 3 times"),
    ],
)
def test_a_redirect_is_checked_like_the_first_url_and_not_revealed(location, message, network):
    network.names = {"inner.example": [["10.0.0.1"]]}
    domains = ("127.0.0.1", "127.0.0.2", "10.0.0.1", "fd00:ec2::254", "*.example")
    with pytest.raises(MediaError, match=message) as raised:
        fetch_from(StubServer({"/a.png": moved(location)}), local(allowed_domains=domains))
    assert "secret" not in str(raised.value)
    assert set(network.connected) == {"127.0.0.1"}


@pytest.mark.network
def test_a_redirect_to_another_allowed_host_is_looked_up_and_followed(network):
    network.names = {NAME: [["127.0.0.1"]]}

    class Redirecting(StubServer):
        async def serve(self, reader, writer):
            self.answers["/a.png"] = moved(f"//{NAME}:{writer.get_extra_info('sockname')[1]}/b.png")
            await super().serve(reader, writer)

    assert fetch_from(Redirecting({"/b.png": answer(PNG)}), local()) == PNG
    assert network.lookups[-1] == NAME
