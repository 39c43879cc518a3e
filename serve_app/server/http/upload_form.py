"""Reads forms with a file (`multipart/form-data`), piece by piece and within bounds.

Source: RFC 7578.
"""

from __future__ import annotations

from collections.abc import Callable

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from serve_app.base.errors import InvalidRequestError, RequestTooLargeError

_MOST_HEADER_BYTES = 8 * 2**10
_MOST_FIELD_BYTES = 4 * 2**10
_MOST_PARTS = 20
_MOST_BOUNDARY = 200
Sink = Callable[[bytes], object]
"""Takes the next bytes of the file."""


class UploadForm:
    """The fields of a form, piece by piece; values of one name are joined by commas. Raises
    InvalidRequestError for what is no such form, and RequestTooLargeError for a file of more than
    `max_bytes`."""

    def __init__(self, content_type: str, sink: Sink, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """The name of the field `file`, which the sink gets; None as long as there was none."""
        self.n_bytes = 0
        self.complete = False
        self._n_parts = 0
        self._sink, self._max_bytes = sink, max_bytes
        self._header, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._name: str | None = None
        """The name of the field that is being read; None while it is the file."""
        self._value = bytearray()
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._part_begins,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header_value.extend(
                    data[start:end]
                ),
                "on_header_end": self._header_ends,
                "on_headers_finished": self._value_begins,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_part_end": self._part_ends,
                "on_end": self._end,
            },
            max_header_size=_MOST_HEADER_BYTES,
        )

    def feed(self, piece: bytes) -> None:
        """Read more of the form. Bytes after the form's end are ignored."""
        if self.complete:
            return
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequestError(f"The form cannot be read: {error}") from None

    def _part_begins(self) -> None:
        self._n_parts += 1
        if self._n_parts > _MOST_PARTS:
            raise InvalidRequestError("The form has too many fields.")
        self._disposition = b""

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _value_begins(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequestError("The form cannot be read: a field has no name.")
        name = _decode_text(options[b"name"])
        self._name = None if name == "file" else name[:64]
        self._value.clear()
        if self._name is None:
            if self.filename is not None:
                raise InvalidRequestError("The form has two files.", "file")
            self.filename = _decode_text(options.get(b"filename", b""))[:255] or "file"

    def _take(self, piece: bytes) -> None:
        if self._name is None:
            self._take_of_file(piece)
            return
        self._value += piece
        if len(self._value) > _MOST_FIELD_BYTES:
            raise InvalidRequestError(
                f"{self._name}: more than {_MOST_FIELD_BYTES} bytes.", self._name
            )

    def _take_of_file(self, piece: bytes) -> None:
        self.n_bytes += len(piece)
        if self.n_bytes > self._max_bytes:
            raise RequestTooLargeError(f"The file has more than {self._max_bytes} bytes.")
        self._sink(piece)

    def _part_ends(self) -> None:
        if self._name is not None:
            value, earlier = _decode_text(bytes(self._value)), self.fields.get(self._name)
            self.fields[self._name] = value if earlier is None else f"{earlier},{value}"

    def _end(self) -> None:
        self.complete = True


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise InvalidRequestError("Send a form: Content-Type: multipart/form-data.")
    boundary = options[b"boundary"]
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise InvalidRequestError("The form's boundary is missing or too long.")
    return boundary


def _decode_text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
