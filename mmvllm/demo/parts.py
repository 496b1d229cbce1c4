"""Parses the parts of an upload while they arrive."""

import logging

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.formparsers import MultiPartException

from mmvllm.utils.text import counted

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a malformed upload is its sender's error


class FileParts:
    """The multipart body of an upload: at most `max_files` files and no other fields; `num_files` have begun.

    By itself, gradio would keep fields in memory, and up to a thousand files open until the last part has arrived.
    Raises ValueError if the content type is not a multipart form, or names a charset.
    """

    def __init__(self, content_type: str, max_files: int):
        self._max_files, self.num_files = max_files, 0
        self._name, self._value, self._disposition = b"", b"", b""
        on_data = {"on_header_field": self._on_header_field, "on_header_value": self._on_header_value}
        on_end = {"on_header_end": self._on_header_end, "on_headers_finished": self._on_headers_finished}
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"charset" in options:  # gradio would decode with the charset
            raise ValueError("Send the files as multipart/form-data")
        callbacks = {"on_part_begin": self._on_part_begin, **on_data, **on_end}
        self._boundary = b"\r\n--" + options.get(b"boundary", b"")
        self._tail, self._num_ends = b"", 0  # the last bytes, and the number of boundaries so far; each ends a part
        self._parser = MultipartParser(options.get(b"boundary", b""), callbacks)

    def add(self, data: bytes) -> None:
        """Parse the next bytes of the body; raises MultiPartException or MultipartParseError, which gradio answers."""
        self._check_boundaries(data)
        self._parser.write(data)

    def _check_boundaries(self, data: bytes) -> None:
        """Refuse more boundaries than the files need: at each boundary in a file, the parser continues byte by byte."""
        recent = self._tail + data
        self._num_ends += recent.count(self._boundary)
        self._tail = recent[1 - len(self._boundary) :]
        if self._num_ends > self._max_files + 1:
            raise MultiPartException(self._too_many)

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        if b"filename" not in parse_options_header(self._disposition)[1]:
            raise MultiPartException("An upload consists of files; it has no other fields")
        self.num_files += 1
        if self.num_files > self._max_files:
            raise MultiPartException(self._too_many)

    @property
    def _too_many(self) -> str:
        return f"At most {counted(self._max_files, 'file')} go into one question"
