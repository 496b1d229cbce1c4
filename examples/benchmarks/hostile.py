"""Inputs of a hostile client: images, HTTP requests and bodies, all of which a server must refuse."""

import base64
import io
import json
import struct
import zlib

from PIL import Image

KEY = "attack-key"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FEW_SIDE, MANY_SCANS, MANY_COMMENTS = 1500, 3000, 300_000


def request_bytes(path: str, body: bytes | None = None, *lines: str, method: str = "POST") -> bytes:
    """Return a whole request with the key; the connection is closed after its response."""
    length = [] if body is None else [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", "Connection: close"]
    return "\r\n".join((*head, *length, *lines, "", "")).encode() + (body or b"")


def chat(content: str | list, **fields: object) -> dict:
    return {"model": "bundled", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def image_chat(data: bytes, question: str, **fields: object) -> dict:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return chat([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}], **fields)


def images() -> dict[str, bytes]:
    """Return images by the defect of each."""
    return {
        "truncated 8000x8000 RGBA PNG": _png(8000, 8000, rows=1),
        "PNG of 2^31 pixels a side": _png(2**31 - 1, 2**31 - 1, rows=0),
        "PNG without pixels": _png(8000, 8000, rows=0),
        "JPEG of 3,000 scans": _jpeg_of_many_scans(),
        "GIF of comments": b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\1a\0" * MANY_COMMENTS,
        "truncated JPEG": _encoded("JPEG")[:600],
        "truncated WebP": _encoded("WEBP")[:200],
        "TIFF": _encoded("TIFF"),
        "BMP of 2^31 pixels a side": b"BM"
        + struct.pack("<IIIIiiHHIIIIII", 99, 0, 54, 40, *[2**31 - 1] * 2, 1, *[24] * 7),
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "signature only": b"\x89PNG\r\n\x1a\n",
        "zeros": bytes(100_000),
        "nothing": b"",
    }


def _png(width: int, height: int, rows: int) -> bytes:
    """Return an RGBA PNG whose data ends after some rows."""
    data = zlib.compress(bytes(rows * (1 + 4 * width)), 9)[:-10]
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", data)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((160, 120), 80).convert("RGB").save(file, kind)
    return file.getvalue()


def _jpeg_of_many_scans() -> bytes:
    """Return a progressive JPEG whose last scan is repeated; a scan's time is proportional to the number of pixels."""
    file = io.BytesIO()
    Image.new("L", (FEW_SIDE, FEW_SIDE), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last_scan * MANY_SCANS + b"\xff\xd9"


def http_requests() -> dict[str, bytes]:
    """Return malformed and ambiguous requests by the defect of each."""
    body = json.dumps({"model": "bundled", "prompt": "Hello", "max_tokens": 1}).encode()
    whole = request_bytes(COMPLETIONS, body, "X: a")
    head, chunks = whole.partition(b"Content-Length")[0], b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    chunked = head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    get = request_bytes("/health", method="GET")
    return {
        "two lengths": whole.replace(b"X: a", b"Content-Length: 5"),
        "length and coding": chunked.replace(b"Transfer", b"Content-Length: 5\r\nTransfer"),
        "bare LF": whole.replace(b"\r\n", b"\n"),
        "one bare LF": whole.replace(b"X: a\r\n", b"X: a\n"),
        "bare CR": whole.replace(b"X: a", b"X: a\rb"),
        "folded line": whole.replace(b"X: a", b"X: a\r\n b"),
        "space before colon": whole.replace(b"X: a", b"X : a"),
        "NUL": whole.replace(b"X: a", b"X: \0"),
        "other coding": chunked.replace(b"chunked", b"gzip, chunked"),
        "chunk size": chunked.replace(chunks, b"zz\r\n"),
        "chunk lines": chunked.replace(chunks, chunks.replace(b"\r\n", b"\n")),
        "trailer": chunked[:-2] + b"X: y\r\n\r\n",
        "unknown expectation": whole.replace(b"X: a", b"Expect: 200-ok"),
        "compressed body": whole.replace(b"X: a", b"Content-Encoding: gzip"),
        "absolute target": get.replace(b"/health", b"http://localhost/health"),
        "CONNECT": get.replace(b"GET /health", b"CONNECT localhost:80"),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\0\1\0\1\xfc\x03\x03" + bytes(200),
        "endless header": get.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * 100_000),
        "many headers": get.replace(b"\r\n\r\n", b"\r\n" + b"a:\r\n" * 20_000 + b"\r\n"),
        "wrong key": get.replace(b"/health", b"/v1/models").replace(KEY.encode(), b"guess"),
        "no key": request_bytes("/docs", method="GET").replace(b"Authorization", b"X"),
        "traversal": get.replace(b"/health", b"/v1/models/%2e%2e/%2e%2e/etc/passwd"),
        "long path": get.replace(b"/health", b"/" + b"a" * 9000),
    }


def bodies() -> dict[str, bytes]:
    """Return bodies of a chat by the defect of each."""
    forged = {
        "long model": chat("Hi") | {"model": "x" * 100_000},
        "long key": chat("Hi", **{"é" * 200_000: 1}),
        "many stops": chat("Hi", stop=["a"] * 100_000),
        "many choices": chat("Hi", n=10**9),
        "many parts": chat([{"type": "text", "text": ""}] * 40_000),
        "long text": chat("a" * 3_000_000),
        "bias": chat("Hi", logit_bias={str(i): 100 for i in range(5000)}),
        "pattern": chat("Hi", guided_regex="(" * 70_000),
        "file": chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
        "private address": chat([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),
        "escaped data": chat([{"type": "image_url", "image_url": {"url": "data:;base64," + "%41" * 300_000}}]),
        "huge bounds": chat("Hi", min_pixels=10**18),
        "long salt": chat("Hi", cache_salt="x" * 100_000),
        "role": {"model": "bundled", "messages": [{"role": "root\r\nX-Evil: 1", "content": "Hi"}]},
    }
    raw = {
        "deep list": b"[" * 90_000,
        "deep object": b'{"a":' * 90_000,
        "long integers": b'{"seed":[' + b",".join([b"9" * 4000] * 1000) + b"]}",
        "not a number": b'{"temperature":NaN}',
        "same key twice": b'{"model":"bundled","model":"bundled"}',
        "lone surrogate": b'{"model":"\\ud800"}',
        "not Unicode": b'{"model":"\xff\xfe"}',
        "many items": b"[" + b"0," * 1_000_000 + b"0]",
    }
    return {name: json.dumps(body).encode() for name, body in forged.items()} | raw
