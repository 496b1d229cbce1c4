"""Who may send requests to the page, and which JSON gradio is given."""

import json
import time
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from mmvllm.demo.checks import MAX_BRACKETS, MAX_COMMAS, clean_headers, is_foreign, is_logged_in, is_simple, is_unusable
from tests.demo.filtering import scope_of

HOST = "lan.test:7860"


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_only_the_page_itself_sends_requests(method):
    def foreign(is_page: bool = True, **headers: str) -> bool:
        return is_foreign(method, Headers(scope=scope_of(host=HOST, **headers)), is_page)

    assert not foreign()  # a program
    # Without `Sec-Fetch-Site`, as browsers send it for pages that are reached by HTTP and not on this machine.
    assert not foreign(origin=f"http://{HOST}") and not foreign(origin=f"http://{HOST.upper()}")
    others = (
        "http://evil.test:8111",
        "http://evil.lan.test:7860",
        "http://lan.test",
        "https://lan.test:78",
        "null",
        "",
        "http://[",
    )
    assert all(foreign(origin=other) for other in others)
    assert all(foreign(origin=other, x_forwarded_host="evil.test:8111") for other in others)
    for site in ("same-origin", "none"):  # a proxy may have another name
        assert not foreign(sec_fetch_site=site, origin="https://proxy.example")
    for site in ("cross-site", "same-site"):
        assert foreign(sec_fetch_site=site, sec_fetch_mode="cors")
        assert foreign(sec_fetch_site=site, sec_fetch_mode="navigate") == (method != "GET")
        assert foreign(is_page=False, sec_fetch_site=site, sec_fetch_mode="navigate")


def test_a_login_is_looked_for_where_gradio_keeps_it():
    app = SimpleNamespace(auth=object(), cookie_id="id", tokens={"right": "bob"})

    def logged_in(app, cookie: str | None = None) -> bool:
        return is_logged_in(scope_of(page=app, **({} if cookie is None else {"cookie": cookie})))

    assert logged_in(SimpleNamespace(auth=None)) and is_logged_in(scope_of())
    assert logged_in(app, "access-token-id=right") and logged_in(app, "a=b; access-token-unsecure-id=right")
    wrong = (None, "", "access-token-id=wrong", "access-token-other=right", "access-token-id=", "right")
    assert not any(logged_in(app, cookie) for cookie in wrong)


def test_json_of_many_parts_is_not_simple():
    text = "{[,]}\\\"'" * 50_000
    for value in ([], {"data": [text, "é" * 9]}, [[]] * (MAX_BRACKETS - 1), [0] * MAX_COMMAS, {"a": {"b": [text] * 2}}):
        assert is_simple(json.dumps(value).encode())
    assert not is_simple(json.dumps(["\u2200", []], ensure_ascii=False).encode("utf-16-le"))
    many = [[]] * MAX_BRACKETS
    for value in (many, {"data": [text, many]}, [0] * (MAX_COMMAS + 2), {text: {"x": many}}):
        assert not is_simple(json.dumps(value).encode())


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\t", "\x1f", "\x7f"])
def test_a_path_with_a_control_character_is_unusable(character):
    """A route also matches a path that a line feed follows: a link to "/logout%0A" logged visitors out."""
    for path in ("/", "/logout", "/gradio_api/info"):
        assert not is_unusable(path) and is_unusable(f"{path}{character}") and is_unusable(f"{character}{path}")


def test_json_with_a_long_number_is_not_simple():
    """Python takes the square of its digits to read it, and to write it."""
    for number in (10**398, -(10**398), 1.7976931348623157e308, float("9" * 309), "9" * 10_000):
        assert is_simple(json.dumps({"data": [number] * 3}).encode())
    for value in (10**400, {"a": [0, -(10**400)]}):
        assert not is_simple(json.dumps(value).encode())
    assert not is_simple(b"[0." + b"1" * 400 + b"]") and not is_simple(b"[1e" + b"0" * 400 + b"]")
    begin = time.thread_time()
    assert is_simple((b"1" * 399 + b" ") * 2621)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("body", [b'"' * 2**20, b'"\\"' * 2**18, b'\\"' * 2**19, b'"' + b"a" * 2**20, b'"\\' * 2**19])
def test_strings_that_do_not_end_are_looked_at_once(body):
    begin = time.thread_time()
    is_simple(body)
    assert time.thread_time() - begin < 2  # each quote is followed by a megabyte


@pytest.mark.parametrize(
    ("host", "is_kept"),
    [("page.example", True), ("[::1]:80", True), ("a.b:1, c", True)]
    + [(host, False) for host in ("[::::]", "[...]", "[::1", "a b", "[1:2]:5", "", "1.2.3.256", "999.999.999.999:80")],
)
def test_hosts_that_gradio_fails_with_are_ignored(host, is_kept):
    scope = scope_of(x_forwarded_host=host, x_gradio_server=f"https://{host.partition(',')[0]}/")
    clean_headers(scope)
    assert ("x-forwarded-host" in Headers(scope=scope)) == is_kept
    assert ("x-gradio-server" in Headers(scope=scope)) == is_kept
