"""The header of a GGUF file: metadata, vocabulary and the list of tensors, without the weights.

Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from serve_app.base.errors import ConfigError

Read = Callable[[int, int], bytes]
"""The bytes of a file from a start up to an end; fewer where the file ends."""
MOST_BYTES = 2**28

FIRST_BYTES = 8 * 2**20
"""Bytes that hold the header of a model with 150,000 tokens."""
SHARD_BYTES = 2**17
"""Bytes that hold the header of a shard with a few layers."""

_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class _Parser:
    """Walks over the bytes and keeps only the position. Raises EOFError and ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def number(self, form: str) -> int:
        """The next number, of that form of struct's."""
        start = self.at
        self.skip(struct.calcsize(form))
        return int(struct.unpack_from(f"<{form}", self._data, start)[0])

    def skip(self, n_bytes: int) -> None:
        if n_bytes > MOST_BYTES:
            raise ValueError("a length in it is impossible")
        self.at += n_bytes
        if self.at > len(self._data):
            raise EOFError

    def skip_string(self) -> None:
        self.skip(self.number("Q"))

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip_string()
        elif kind == _ARRAY:
            of, n = self.number("I"), self.number("Q")
            if of in _NUMBERS:
                self.skip(n * _NUMBERS[of])
            else:
                for _ in range(n):
                    self.skip_value(of)
        elif kind in _NUMBERS:
            self.skip(_NUMBERS[kind])
        else:
            raise ValueError(f"it has a value of the unknown kind {kind}")


def length(data: bytes) -> int:
    """Bytes of the header that these bytes begin with. Raises EOFError if they end within it, and
    ValueError if they are no GGUF file's."""
    parser = _Parser(data)
    parser.skip(4)
    if data[:4] != b"GGUF":
        raise ValueError("it is not a GGUF file")
    if (version := parser.number("I")) not in _VERSIONS:
        raise ValueError(f"it is GGUF of the unknown version {version}")
    n_tensors, n_values = parser.number("Q"), parser.number("Q")
    for _ in range(n_values):
        parser.skip_string()
        parser.skip_value(parser.number("I"))
    for _ in range(n_tensors):
        parser.skip_string()
        parser.skip(8 * parser.number("I") + 4 + 8)
    return parser.at


def read_header(source: Read, name: str, first_bytes: int) -> bytes:
    """The header of a file, of which no more than twice as much is read, or so many bytes. Raises
    ConfigError if it is none, and what `source` raises."""
    data, wanted = b"", first_bytes
    while True:
        data += source(len(data), wanted)
        try:
            return data[: length(data)]
        except ValueError as error:
            raise ConfigError(f"{name}: {error}.") from None
        except EOFError:
            if len(data) < wanted or wanted > MOST_BYTES:
                raise ConfigError(f"{name}: it ends within its metadata.") from None
        wanted *= 2


def write_hollow(path: Path, header: bytes, n_bytes: int) -> None:
    """A file that begins with the header and has the length of the whole one, with a hole where the weights
    would be: llama.cpp reads metadata and vocabulary from it, and it takes no more disk than those. It is
    there whole or not at all. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(header)
        file.truncate(max(n_bytes, len(header)))
    part.replace(path)
