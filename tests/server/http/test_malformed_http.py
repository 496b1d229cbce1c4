"""Ambiguous and malformed HTTP over raw sockets: refused as an OpenAI error object, and the connection closed."""

import json
import time

import h11
import pytest

from mmvllm.server.http import parser
from mmvllm.server.http.parser import MalformedRequest, StrictConnection, check_head
from tests.helpers.needs import needs
from tests.helpers.serving.server import COMPLETIONS, completion, head, post, receive_all, receive_until

pytestmark = pytest.mark.thinned

BODY = json.dumps(completion()).encode()
WHOLE = post(COMPLETIONS, completion(), "X: a")
CHUNKED = head(COMPLETIONS, None, "X: a") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


def with_lines(request: bytes, lines: bytes) -> bytes:
    return request.replace(b"X: a\r\n", lines)


def with_target(target: bytes, method: bytes = b"GET") -> bytes:
    return GET.replace(b"GET /health", method + b" " + target)


MALFORMED = {
    "content-length and transfer-encoding": (400, with_lines(CHUNKED, LENGTH)),
    "content-length twice": (400, with_lines(WHOLE, LENGTH)),
    "list of content-lengths": (400, WHOLE.replace(LENGTH, LENGTH[:-2] + b", %d\r\n" % len(BODY))),
    "signed content-length": (400, WHOLE.replace(b"Length: ", b"Length: +")),
    "empty content-length": (400, WHOLE.replace(LENGTH, b"Content-Length:\r\n")),
    "endless content-length": (400, WHOLE.replace(LENGTH, b"Content-Length: " + b"9" * 5000 + b"\r\n")),
    "one line ends with LF": (400, with_lines(WHOLE, b"X: a\n")),
    "empty line ends with LF": (400, WHOLE.replace(b"\r\n\r\n", b"\r\n\n")),
    "carriage return in a value": (400, with_lines(WHOLE, b"X: a\rb\r\n")),
    "folded line, space": (400, with_lines(WHOLE, b"X: a\r\n b\r\n")),
    "folded line, tab": (400, with_lines(WHOLE, b"X: a\r\n\tb\r\n")),
    "space before the colon": (400, with_lines(WHOLE, b"X : a\r\n")),
    "NUL in a value": (400, with_lines(WHOLE, b"X: a\0b\r\n")),
    "coding before chunked": (400, CHUNKED.replace(b"chunked", b"gzip, chunked")),
    "chunked twice": (400, with_lines(CHUNKED, b"Transfer-Encoding: chunked\r\n")),
    "vertical tab before chunked": (400, CHUNKED.replace(b"chunked", b"\x0bchunked")),
    "transfer-encoding in HTTP/1.0": (400, CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0")),
    "negative chunk size": (400, head(COMPLETIONS, None) + b"-5\r\nhello"),
    "prefixed chunk size": (400, head(COMPLETIONS, None) + b"0x5\r\nhello"),
    "endless chunk extension": (431, head(COMPLETIONS, None) + b"5;" + b"a" * 20_000),
    "chunk without its CRLF": (400, CHUNKED.replace(b"\r\n0\r\n", b"0\r\n")),
    "LF after a chunk size": (400, head(COMPLETIONS, None) + b"5\nhello"),
    "LF after the last chunk": (400, CHUNKED.replace(b"\r\n0\r\n\r\n", b"\r\n0\r\n\n")),
    "trailer": (400, CHUNKED.replace(b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n")),
    "unfinished trailer": (400, CHUNKED.replace(b"0\r\n\r\n", b"0\r\nX: y\r\n")),
    "malformed chunk of a HEAD request": (400, head("/health", None).replace(b"POST", b"HEAD") + b"zz\r\n"),
    "absolute target": (400, with_target(b"http://x/health")),
    "authority target": (400, with_target(b"x:443", b"CONNECT")),
    "non-ASCII target": (400, with_target("/é".encode())),
    "space in the target": (400, with_target(b"/a b")),
    "no host": (400, GET.replace(b"Host: x\r\n", b"")),
    "two hosts": (400, with_lines(GET, b"Host: x\r\n")),
    "host with a bracket": (400, GET.replace(b"Host: x", b"Host: [")),
    "host with a user": (400, GET.replace(b"Host: x", b"Host: a@x")),
    "HTTP/2 preface": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "no version": (400, GET.replace(b" HTTP/1.1", b"")),
    "only line ends": (400, b"\n\n\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
    "long header": (431, with_lines(GET, b"X: " + b"a" * parser.MAX_HEAD_BYTES + b"\r\n")),
    "many short headers": (431, with_lines(GET, b"a:\r\n" * parser.MAX_HEAD_LINES)),
}


@pytest.fixture
@needs("network")
def connection(running):
    with running.connect() as connection:
        yield connection


def response_to(connection, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response, after which the server closes the connection."""
    connection.sendall(request)
    answer_head, _, body = receive_all(connection).partition(b"\r\n\r\n")
    status_line, *lines = answer_head.decode().split("\r\n")
    return int(status_line.split(" ")[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.spawns
@pytest.mark.parametrize(("status", "request_bytes"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_refused_and_the_connection_closed(running, connection, status, request_bytes, caplog):
    got, headers, body = response_to(connection, request_bytes)
    assert got == status and json.loads(body)["error"]["message"]
    assert headers["connection"] == "close" and int(headers["content-length"]) == len(body)
    assert headers["x-request-id"].startswith("req_")
    assert running.get("/health").status_code == 200 and not caplog.records


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"Expect: 200-ok", 417),
        (b"Expect: 100-continue, 200-ok", 417),
        (b"Content-Encoding: gzip", 415),
        (b"Content-Encoding: identity, br", 415),
        (b"Content-Encoding: x\r\nContent-Encoding: identity", 415),
    ],
)
def test_unknown_expectations_and_encodings_are_refused(connection, line, status):
    got, headers, body = response_to(connection, with_lines(WHOLE, line + b"\r\n"))
    assert got == status and json.loads(body)["error"]["type"] == "invalid_request_error"
    assert headers["connection"] == "close" and ("accept-encoding" in headers) == (status == 415)


@pytest.mark.parametrize(
    "line", [b"Expect: 100-Continue", b"Content-Encoding: identity", b"Content-Encoding:", b"Transfer-Encodings: x"]
)
def test_known_expectations_and_encodings_are_accepted(connection, line):
    connection.sendall(with_lines(WHOLE, line + b"\r\nConnection: close\r\n"))
    assert b"HTTP/1.1 200 OK" in receive_all(connection)


def test_a_malformed_request_after_a_valid_one_gets_its_own_response(connection):
    connection.sendall(WHOLE + post("/nowhere", {}) + CHUNKED + with_lines(CHUNKED, LENGTH) + WHOLE)
    statuses = [answer[:3] for answer in receive_all(connection).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"200", b"400"]  # in the order of the requests


def test_what_follows_a_refused_request_is_not_a_request(running, connection):
    """The bytes of a smuggled request are not served."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    connection.sendall(with_lines(CHUNKED, b"Content-Length: 0\r\n") + smuggled)
    assert receive_all(connection).count(b"HTTP/1.1 ") == 1


def events_of(pieces: list[bytes]) -> list[str]:
    """Names of the parser's events for requests that arrive in pieces and are answered at once."""
    connection, names = StrictConnection(h11.SERVER), []
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=204, headers=[]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            if not isinstance(event, h11.Data):  # one per piece
                names.append(type(event).__name__)
    return names


def test_requests_may_be_split_at_any_byte():
    requests = WHOLE + CHUNKED + GET
    expected = ["Request", "EndOfMessage"] * 3
    for i in range(len(requests)):
        assert events_of([requests[:i], requests[i:]][i == 0 :]) == expected
    assert events_of([requests[i : i + 1] for i in range(len(requests))]) == expected


def test_requests_may_arrive_while_an_earlier_one_is_served():
    connection = StrictConnection(h11.SERVER)
    for received in (GET, CHUNKED + CHUNKED[:10], CHUNKED[10:]):
        connection.receive_data(received)
        while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            pass
    for _ in range(2):
        connection.send(h11.Response(status_code=204, headers=[]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass


@pytest.mark.parametrize(("_status", "request_bytes"), MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize(("places", "size"), [(20, 64), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_malformed_requests_are_refused_however_they_are_split(_status, request_bytes, places, size):
    step = max(1, len(request_bytes) // places)
    for i in range(step, len(request_bytes), step):
        with pytest.raises(h11.RemoteProtocolError):
            events_of([GET, request_bytes[:i], request_bytes[i:]])
    size = size if len(request_bytes) > 2000 else 1
    with pytest.raises(h11.RemoteProtocolError):
        events_of([request_bytes[i : i + size] for i in range(0, len(request_bytes), size)])


def test_an_unfinished_head_is_refused_at_its_first_bad_line():
    check_head(GET[:-2])
    check_head(GET[:-3])  # between CR and LF
    for begun in (b"GET / HTTP/1.1\nHost", b"GET / HTTP/1.1\rH", b"GET / HTTP/1.1\r\n X", b"a" * 20_000):
        with pytest.raises(MalformedRequest):
            check_head(begun)


def test_checking_a_head_takes_microseconds():
    start = time.thread_time()
    for _ in range(1000):
        check_head(WHOLE)
    assert time.thread_time() - start < 0.2  # serving a request takes milliseconds


def test_long_paths_and_methods_are_cut_in_messages(connection):
    connection.sendall(with_target(b"/" + b"a" * 9000) + with_target(b"/health", b"A" * 9000))
    answers = receive_until(connection, b"405 Method")
    if not answers.endswith(b"}}"):
        answers += receive_until(connection, b"}}")
    assert answers.count(b"a" * 100) < 5 and b"A" * 100 not in answers
