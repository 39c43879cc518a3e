"""Reads a form with one file as it comes: the file goes to a disk, and never lies in memory.

Source: RFC 7578, "Returning Values from Forms: multipart/form-data".
"""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message

from serve_app.errors import InvalidRequestError, RequestTooLargeError

_MOST_HEADERS = 8 * 2**10
_MOST_FIELD = 4 * 2**10
_MOST_FIELDS = 20
Sink = Callable[[bytes], object]
"""Takes the next bytes of the file."""


class Form:
    """The fields of a form, piece by piece. Raises InvalidRequestError for what is no such form, and
    RequestTooLargeError for a file of more than `max_bytes`."""

    def __init__(self, content_type: str, sink: Sink, max_bytes: int) -> None:
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_param("boundary")
        if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise InvalidRequestError("Send a form: Content-Type: multipart/form-data.")
        if not 0 < len(boundary) <= 200:
            raise InvalidRequestError("The form's boundary is missing or too long.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the field `file`, which the sink has got; None as long as there was none."""
        self.n_bytes = 0
        self._sink, self._max_bytes = sink, max_bytes
        self._border = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")
        self._read: Callable[[], bool] = self._preamble
        self._name, self._value = "", bytearray()
        self._begins = False
        """Whether the line end before a field's value is still there: an empty one's border follows it."""
        self.complete = False

    def feed(self, piece: bytes) -> None:
        """More of it has come."""
        self._buffer += piece
        while not self.complete and self._read():
            pass
        if self.complete:
            self._buffer.clear()

    def _preamble(self) -> bool:
        return self._part(lambda _: None)

    def _between(self) -> bool:
        """Behind a border: the end, or another field's headers."""
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self.complete = True
            return False
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEADERS:
                raise InvalidRequestError(
                    "The form cannot be read: a field's headers are too long."
                )
            return False
        self._begin(bytes(self._buffer[2:end]))
        del self._buffer[: end + 2]
        self._begins = True
        return True

    def _begin(self, headers: bytes) -> None:
        """A field with these headers."""
        told = Message()
        for line in headers.split(b"\r\n"):
            header, _, value = line.decode("utf-8", "replace").partition(":")
            if header.strip().lower() == "content-disposition":
                told["content-disposition"] = value.strip()
        name = told.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise InvalidRequestError("The form cannot be read: a field has no name.")
        if name == "file":
            if self.filename is not None:
                raise InvalidRequestError("The form has two files.", "file")
            self.filename = (told.get_filename() or "file")[:255]
            self._read = self._file
        elif len(self.fields) < _MOST_FIELDS:
            self._name, self._value = name[:64], bytearray()
            self._read = self._field
        else:
            raise InvalidRequestError("The form has too many fields.")

    def _file(self) -> bool:
        return self._part(self._take)

    def _take(self, piece: bytes) -> None:
        self.n_bytes += len(piece)
        if self.n_bytes > self._max_bytes:
            raise RequestTooLargeError(f"The file has more than {self._max_bytes} bytes.")
        self._sink(piece)

    def _field(self) -> bool:
        ended = self._part(self._value.extend)
        if len(self._value) > _MOST_FIELD:
            raise InvalidRequestError(f"{self._name}: more than {_MOST_FIELD} bytes.", self._name)
        if ended:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        return ended

    def _part(self, take: Sink) -> bool:
        """Hand over what comes before the next border; True if that has come."""
        if self._begins:
            if len(self._buffer) < len(self._border):
                return False
            self._begins = False
            if not self._buffer.startswith(self._border):
                del self._buffer[:2]
        at = self._buffer.find(self._border)
        n_sure = len(self._buffer) - len(self._border) + 1 if at < 0 else at
        if n_sure > 0:
            take(bytes(self._buffer[:n_sure]))
            del self._buffer[:n_sure]
        if at < 0:
            return False
        del self._buffer[: len(self._border)]
        self._read = self._between
        return True
