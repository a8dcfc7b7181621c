"""A text file that may grow while it is read: bytes in, lines out; holds no file open.

Encoding and newline are detected from the beginning of the file. A file that shrinks, is replaced
or written over is refused, since old records would come a second time.
"""

from __future__ import annotations

import gzip
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from veilstream.errors import InputError

_SAMPLE_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
SETTLED_S = 2.0  # a last line without a newline counts as whole once the file has not changed for this long
_LONGEST_LINE = 1 << 24
_LAST_BYTES = 256  # bytes before the position that are compared again before more is read

_OTHER_KINDS = (  # first bytes of files that are not text
    (b"BZh", "a bzip2 archive", "unpack it: bunzip2 -k"),
    (b"\xfd7zXZ", "an xz archive", "unpack it: unxz -k"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it: unzstd"),
    (b"PK\x03\x04", "a zip archive or an Excel workbook", "unpack it, or save the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "save the sheet as CSV"),
    (b"PAR1", "a Parquet file", "name it .parquet"),
    (b"ARROW1", "an Arrow file", "name it .arrow"),
    (b"%PDF", "a PDF file", "export the table as CSV"),
    (b"<!DOCTYPE", "a web page", "the download went wrong: fetch the file again"),
    (b"<html", "a web page", "the download went wrong: fetch the file again"),
    (b"<?xml", "an XML file", "export the table as CSV"),
)


def check_plain_file(path: Path) -> None:
    """Refuse (`InputError`) what is missing, a folder, a pipe or device, or not readable."""

    def refused(rule: str, way_out: str) -> InputError:
        return InputError("data", str(path), rule, way_out)

    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise refused("a file; this is a folder", "name a file in it")
        if not stat.S_ISREG(mode):
            raise refused(
                "a plain file, which can be read again after a restart",
                "this is a pipe, socket or device: write its records to a file",
            )
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        if path.is_symlink():
            aim = str(path.readlink())
            raise refused(f"a link to a file that is there, not to {aim!r}", "mend it") from error
        raise refused("a file that is there", "check the path") from error
    except OSError as error:
        raise refused(f"a file that this account may read ({error.strerror})", "see ls -l, and its folder's") from error


class GrowingLines:
    """The lines of a file, as text, each with its newline."""

    def __init__(self, path: Path, *, whole: bool, header: bool = False) -> None:
        check_plain_file(path)
        self.path, self._whole = path, whole
        sample = self._first_bytes()
        for magic, kind, way_out in _OTHER_KINDS:
            if sample.startswith(magic):
                raise InputError("data", path.name, f"text; this is {kind}", way_out)
        self.encoding, self.bom, self.notice = _encoding(sample, path.name, header)
        self.sample = sample[self.bom :].decode(self.encoding, "replace")
        newline = "\r" if "\n" not in self.sample and "\r" in self.sample.rstrip("\r") else "\n"
        self._newline = newline.encode(self.encoding)
        self._position = self.bom
        self._buffer = b""  # what follows there, as far as it has been fetched
        self._at = 0
        self._last = b""  # the end of what has been fetched
        self._file_number = path.stat().st_ino
        self._cut = False  # whether the last line given out was too long, and its rest is still to come
        self.number = 0  # number of the last line given out, from 1

    def _first_bytes(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_SAMPLE_BYTES)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._next_piece()
        while self._cut:  # the rest of a line of which the beginning was given: it is nobody's record
            self._cut = not line.endswith(self._newline)
            line = self._next_piece()
        self._cut = len(line) >= _LONGEST_LINE and not line.endswith(self._newline)
        self.number += 1
        try:
            return line.decode(self.encoding, "surrogateescape")
        except UnicodeDecodeError:  # half a character of UTF-16
            return line.decode(self.encoding, "replace") + "\udc80"

    def _next_piece(self) -> bytes:
        end = self._end_of_line()
        while end < 0 and self._fetch():
            end = self._end_of_line()
        if end < 0:
            end = len(self._buffer)
            if end == self._at or not self.settled():
                raise StopIteration
        line = self._buffer[self._at : end]
        self._at = end
        self._position += len(line)
        return line

    @property
    def position(self) -> int:
        """How many bytes of the file have been given out."""
        return self._position

    def block(self) -> bytes:
        """Whole lines that follow, some 64 KiB, with their newlines; nothing of them is given out yet.

        Empty where none is whole, or a newline is no single byte.
        """
        if self._newline != b"\n":
            return b""
        while (first := self._buffer.find(b"\n", self._at)) < 0:
            if len(self._buffer) - self._at > _LONGEST_LINE or not self._fetch():
                return b""
        last = self._buffer.rfind(b"\n", first, self._at + _BLOCK_BYTES)
        return self._buffer[self._at : max(first, last) + 1]

    def give_out(self, block: bytes) -> None:
        """Count a block, as `block` returned it, as given out."""
        self._at += len(block)
        self._position += len(block)
        self.number += block.count(b"\n")

    def rows_left(self, rows: int) -> int | None:
        """About how many rows follow, if they are as long as those read so far."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return None
        if not rows:
            return None if size > self._position else 0
        return round(max(0, size - self._position) * rows / max(1, self._position - self.bom))

    def settled(self) -> bool:
        """Whether an unfinished line or quote will not be continued."""
        return self._whole or time.time() - self.path.stat().st_mtime >= SETTLED_S

    def _end_of_line(self) -> int:
        width = len(self._newline)
        found = self._buffer.find(self._newline, self._at)
        while found >= 0 and (found - self._at) % width:  # half a character
            found = self._buffer.find(self._newline, found + 1)
        if found < 0 and len(self._buffer) - self._at > _LONGEST_LINE:
            return self._at + _LONGEST_LINE
        return -1 if found < 0 else found + width

    def _fetch(self) -> bool:
        known = self._position + len(self._buffer) - self._at
        try:
            about = self.path.stat()
            if about.st_ino != self._file_number:
                raise self._changed("is another file now")
            if about.st_size < known:
                raise self._changed("has become shorter")
            with self.path.open("rb") as file:
                file.seek(known - len(self._last))
                if file.read(len(self._last)) != self._last:
                    raise self._changed("was written over")
                more = file.read(_CHUNK_BYTES)
        except FileNotFoundError as error:
            raise self._changed("is gone") from error
        except OSError as error:
            raise self._changed(f"cannot be read now ({error.strerror})") from error
        self._last = (self._last + more)[-_LAST_BYTES:]
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return bool(more)

    def _changed(self, what: str) -> InputError:
        return InputError(
            "data",
            str(self.path),
            f"a file that only grows; it {what}",
            "put the old content back, or give new records in a file of another name",
        )


class GzipLines(GrowingLines):
    """The same of a file that is packed with gzip; it may grow by further members."""

    def __init__(self, path: Path, *, whole: bool, header: bool = False) -> None:
        self._stream: gzip.GzipFile | None = None
        self._size = -1  # of the file when the stream was opened
        super().__init__(path, whole=whole, header=header)

    def _first_bytes(self) -> bytes:
        found = b""
        with gzip.open(self.path) as file:
            try:
                while len(found) < _SAMPLE_BYTES and (more := file.read1(_CHUNK_BYTES)):
                    found += more
            except EOFError:  # the rest may be written later
                pass
            except (OSError, zlib.error) as error:
                raise self._damaged() from error
        return found[:_SAMPLE_BYTES]

    def rows_left(self, rows: int) -> int | None:
        """Unknown: how much the rest holds is seen when it is unpacked."""
        return None

    def _fetch(self) -> bool:
        known = self._position + len(self._buffer) - self._at
        try:
            about = self.path.stat()
            if about.st_ino != self._file_number or about.st_size < self._size:
                raise self._changed("is another file now, or has become shorter")
            if self._stream is None or about.st_size != self._size:
                self._stream, self._size = gzip.GzipFile(self.path), about.st_size
                while (left := known - self._stream.tell()) > 0 and self._stream.read1(min(left, _CHUNK_BYTES)):
                    pass
            more = self._stream.read1(_CHUNK_BYTES)
        except FileNotFoundError as error:
            raise self._changed("is gone") from error
        except EOFError:
            self._stream = None
            if self.settled():
                raise self._changed("ends in the middle of what is packed") from None
            return False
        except (OSError, zlib.error) as error:
            raise self._damaged() from error
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return bool(more)

    def _damaged(self) -> InputError:
        return InputError("data", self.path.name, "a whole gzip file; this one is damaged", "copy it again")


def text_lines(path: Path, *, whole: bool, header: bool = False) -> GrowingLines:
    """A text file's lines, packed or not; ``header``: its first line is nobody's record."""
    check_plain_file(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return (GzipLines if packed else GrowingLines)(path, whole=whole, header=header)


def is_broken_text(text: str) -> bool:
    """Whether it holds bytes that are not text, or a zero byte (a disk that lost a block)."""
    if "\x00" in text:
        return True
    try:
        text.encode()
    except UnicodeEncodeError:  # surrogates stand for such bytes
        return True
    return False


def _encoding(sample: bytes, name: str, header: bool) -> tuple[str, int, str]:
    """Encoding, length of the byte-order mark, and a notice."""
    if sample.startswith(b"\xef\xbb\xbf"):
        return "utf-8", 3, ""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if sample.startswith((mark + b"\x00\x00", b"\x00\x00" + mark)):
            raise InputError("data", name, "UTF-8; this is UTF-32", "save the file as UTF-8")
        if sample.startswith(mark):
            return encoding, 2, f"{name}: read as {encoding.upper()}"
    for place, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        # Without a mark: every other byte of Latin letters is zero.
        zeros, others = sample[place:4096:2], sample[1 - place : 4096 : 2]
        if 2 * zeros.count(0) > len(zeros) > 0 and 10 * others.count(0) <= len(others):
            return encoding, 0, f"{name}: read as {encoding.upper()}"
    cut = sample.rfind(b"\n") + 1 or len(sample)
    lines = sample[:cut].splitlines()
    bad = sum(not _is_utf8(line) for line in lines)
    named_so = (
        header and lines and not _is_utf8(lines[0]) and all(line.isascii() or not _is_utf8(line) for line in lines)
    )
    if bad and (named_so or bad > max(1, len(lines) // 100)) and not _has_controls(sample):
        return "cp1252", 0, f"{name}: no UTF-8, read as Windows-1252"
    return "utf-8", 0, ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _has_controls(sample: bytes) -> bool:
    return any(byte in sample for byte in (b"\x81", b"\x8d", b"\x8f", b"\x90", b"\x9d", b"\x00"))
