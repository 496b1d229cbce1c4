"""Hosts and bodies that requests to the page name, and gradio cannot handle."""

import socket
from urllib.parse import urlsplit

import pytest

from tests.helpers.serving.pages import get


@pytest.mark.parametrize("path", ["", "config", f"static/{'a' * 256}", f"assets/{'é' * 200}", f"static/{'a/' * 3000}"])
@pytest.mark.parametrize("header", ["X-Forwarded-Host", "X-Gradio-Server"])
def test_no_address_and_no_path_is_an_error_of_the_server(header, path, site, capfd):
    for value in ("[::1", "a:x", "a:b:c", "http://a:b", "xn--\x80", "%zz", "a b", "\xe9.org", "a" * 300):
        answer = get(site.url + path, headers={header: value.encode("latin-1")})
        assert answer.status_code == (404 if len(path) > 200 else 200), value
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["999.999.999.999", "1.2.3.256", "[::1", "a:x", "xn--\x80", "a b"])
def test_a_host_that_is_none_is_refused(host, site, capfd):
    for path in ("", "config", "gradio_api/info"):
        assert get(site.url + path, headers={"Host": host.encode("latin-1")}).status_code == 400
    assert capfd.readouterr().err == ""


def test_the_address_before_a_proxy_is_that_of_the_page(site):
    for given in ("chat.example.org", "chat.example.org:8443, 10.0.0.1", "[::1]:80"):
        root = get(f"{site.url}config", headers={"X-Forwarded-Host": given}).json()["root"]
        assert root == f"http://{given.partition(',')[0].removesuffix(':80')}"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_no_body_is_waited_for_where_none_belongs(method, site):
    """Gradio waited for it without an end."""
    for path in ("", "config", "theme.css", "robots.txt", "assets/a.js", "gradio_api/startup-events"):
        for header in ({"Content-Length": "1000"}, {"Transfer-Encoding": "chunked"}):
            assert sent_alone(site, f"{method} /{path} HTTP/1.1", header).startswith(b"HTTP/1.1 400")


def sent_alone(site, line: str, header: dict[str, str]) -> bytes:
    """The first bytes of the response to a request whose body does not come."""
    head = "\r\n".join([line, "Host: a", *(f"{name}: {value}" for name, value in header.items()), "", ""])
    place = urlsplit(site.url)
    with socket.create_connection((place.hostname, place.port), 30) as connection:
        connection.sendall(head.encode())
        return connection.recv(100)
