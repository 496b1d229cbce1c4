"""Images and videos in uncompressed tar files, such as webdataset shards: found by their headers, read by seeking."""

import errno
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from mmvllm.captioning.sources.names import MAX_PATH, is_hidden_name, is_media_name, is_video_name
from mmvllm.processors.images.load import MAX_FILE_BYTES

PACKED = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4|lzma|z)|tgz|tbz2?|txz|tzst)\Z", re.IGNORECASE)
# Types of extended headers, which describe the next member or all members.
EXTENDED = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *(b"x", b"g", b"X"))
MAX_EXTENDED = 256 * 1024  # bytes; names take a few thousand
MAX_SPARSE_BLOCKS = 1000  # of 512 bytes, with 21 entries each
# A run of digits makes tarfile's search of a header take quadratic time. Names have at most 255 bytes.
_LONG_DIGITS = re.compile(rb"\d{256}")
MAX_VALUES = 1000  # of a pax header and of the global ones, which tarfile copies to each member
_PACKED_STARTS = (b"\x1f\x8b", b"\xfd7zXZ", b"(\xb5/\xfd", b"\x04\x22\x4d\x18")


class _Header(tarfile.TarInfo):
    """A tar header; extended headers, which tarfile reads into memory as a whole, are limited in size.

    Sparse files are skipped, so their block lists are limited or not read.
    """

    @classmethod
    def frombuf(cls, *args: Any) -> "_Header":
        made = super().frombuf(*args)
        if made.type in EXTENDED and made.size > MAX_EXTENDED:
            raise tarfile.ReadError(f"a header has {made.size} bytes, more than {MAX_EXTENDED}")
        return made

    def _proc_pax(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        begin = tar.fileobj.tell()
        number = _check_pax(tar.fileobj.read(self.size))
        if len(tar.pax_headers) + number > MAX_VALUES:
            raise tarfile.ReadError(f"a member has more than {MAX_VALUES} values, with those for all members")
        tar.fileobj.seek(begin)
        return super()._proc_pax(tar)

    def _proc_sparse(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        _, continues, _ = self._sparse_structs
        begin, number = tar.fileobj.tell(), 0
        while continues:
            number += 1
            if number > MAX_SPARSE_BLOCKS:
                limit = f"the list of a sparse file must have at most {MAX_SPARSE_BLOCKS} blocks"
                raise tarfile.ReadError(f"{self.name}: {limit}; write the tar without --sparse")
            continues = any(tar.fileobj.read(tarfile.BLOCKSIZE)[504:505])
        tar.fileobj.seek(begin)
        return super()._proc_sparse(tar)

    def _proc_gnusparse_00(self, member: tarfile.TarInfo, *_: Any) -> None:
        member.sparse = []

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00


def _check_pax(header: bytes) -> int:
    """Return the number of records; raises ReadError for long runs of digits and for overlapping records.

    tarfile would keep a copy of each overlapping record.
    """
    if _LONG_DIGITS.search(header):
        raise tarfile.ReadError("a pax header has more than 255 digits in a row")
    at = number = 0
    while at < len(header) and header[at]:  # zeros may follow the records
        digits, _, _ = header[at : at + 20].partition(b" ")
        end = at + (int(digits) if digits.isdigit() else 0)
        if end <= at + len(digits) + 1 or header[end - 1 : end] != b"\n" or b"=" not in header[at:end]:
            raise tarfile.ReadError("a pax header has a record that is not LENGTH NAME=VALUE")
        at, number = end, number + 1
    return number


@dataclass(frozen=True, slots=True)
class TarMember:
    """The position of a file in an uncompressed tar: `size` bytes from byte `offset`; `kind` is "image" or "video"."""

    tar: str
    offset: int
    size: int
    kind: str = "image"

    def read(self) -> bytes:
        """Read the file; thread-safe. Raises ValueError if it is too large or can no longer be read."""
        if self.size > MAX_FILE_BYTES:
            raise ValueError(
                f"{self.tar}: the {self.kind} in it has {self.size} bytes, more than {MAX_FILE_BYTES}; shrink it first"
            )
        try:
            with _open_regular(self.tar) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise ValueError(f"{self.tar}: cannot be read ({error.strerror})") from None
        if len(data) < self.size:
            raise ValueError(f"{self.tar}: ends {self.size - len(data)} bytes before the {self.kind} in it does")
        return data


Source = str | TarMember  # a path, or a file in a tar


def tar_members(
    path: str | os.PathLike, on_other: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, TarMember | None]]:
    """Yield the name and position of each image and video in an uncompressed tar; a link has the position None.

    `on_other` is called with the name of each other file, and of each hidden one.

    Raises ValueError if the tar cannot be opened, is compressed, or is damaged; the members before the damage are
    yielded first.
    """
    tar = os.fsdecode(path)
    try:
        with _open_regular(tar) as file:
            if PACKED.search(tar) or file.read(6).startswith(_PACKED_STARTS):
                raise ValueError(f"{tar}: is compressed, images cannot be reached by seeking; decompress it first")
            for header in _headers(file, tar):
                if is_hidden(header.name) or not is_media_name(header.name):
                    if not header.isdir():
                        on_other(header.name)
                elif _is_plain(header):
                    kind = "video" if is_video_name(header.name) else "image"
                    yield header.name, TarMember(tar, header.offset_data, header.size, kind)
                elif header.islnk() or header.issym():
                    yield header.name, None
    except OSError as error:
        raise ValueError(f"{tar}: cannot be read ({error.strerror})") from None


def _headers(file: BinaryIO, path: str) -> Iterator[tarfile.TarInfo]:
    end = os.fstat(file.fileno()).st_size
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
            while (header := tar.next()) is not None:
                if any(name.startswith("GNU.sparse.") for name in tar.pax_headers):
                    raise tarfile.ReadError("its global header marks all members as sparse; write it without --sparse")
                header.name = header.name.partition("\0")[0]  # names in other kinds of headers end there
                if len(header.name) > MAX_PATH:
                    raise tarfile.ReadError(f"a name has {len(header.name)} characters, more than {MAX_PATH}")
                tar.members.clear()  # tarfile would keep every header
                is_cut = _is_plain(header) and header.offset_data + header.size > end
                if is_cut or header.size < 0 or tar.offset <= header.offset:
                    raise tarfile.ReadError(f"{header.name} is incomplete")
                yield header
            file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # `next` treats a bad header as the end
            raise tarfile.ReadError(f"no member begins at byte {tar.offset}")
    except Exception as error:  # tarfile raises exceptions of many types on damaged files
        raise ValueError(f"{path}: the tar is damaged or truncated ({error})") from None


def _is_plain(header: tarfile.TarInfo) -> bool:
    return header.isreg() and not header.issparse()


def _open_regular(path: str) -> BinaryIO:
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading another kind of file might block or never end
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe")
    return open(path, "rb")


def is_hidden(member: str) -> bool:
    """Return whether the member or a folder above it is hidden; './' and '../' are not."""
    return any(map(is_hidden_name, member.split("/")))
