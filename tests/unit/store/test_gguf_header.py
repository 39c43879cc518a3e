"""Headers of GGUF files, and files that are nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.kernels.llama.model import Model
from serve_app.store import gguf_header
from serve_app.store.builtin_model import BUILTIN_MODEL

CONTENT = BUILTIN_MODEL.read_bytes()


def read_of(content: bytes, first_bytes: int = 1000) -> tuple[bytes, int]:
    """The header, and how many bytes of the file were read for it."""
    read = 0

    def source(start: int, end: int) -> bytes:
        nonlocal read
        read = max(read, min(end, len(content)))
        return content[start:end]

    return gguf_header.read_header(source, "a.gguf", first_bytes), read


def test_little_more_than_the_header_is_read() -> None:
    header, n_read = read_of(CONTENT)
    assert CONTENT.startswith(header)
    assert len(header) <= n_read < 2 * len(header)


def test_a_hollow_file_tells_what_the_whole_one_does(tmp_path: Path) -> None:
    header, _ = read_of(CONTENT)
    path = tmp_path / "hollow.gguf"
    gguf_header.write_hollow(path, header, len(CONTENT))
    hollow, whole = Model(path, vocab_only=True), Model(BUILTIN_MODEL, vocab_only=True)
    assert hollow.metadata() == whole.metadata()
    assert hollow.vocabulary_key == whole.vocabulary_key
    assert hollow.n_bytes == whole.n_bytes
    assert path.stat().st_size == len(CONTENT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends within its metadata"),
        (b"<!doctype html>" + b" " * 5000, "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "of the unknown version 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "a length in it is impossible"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 0, 1, 1, b"a", 99), "of the unknown kind 99"),
        (CONTENT[:5000], "ends within its metadata"),
    ],
)
def test_what_is_no_header_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"a.gguf: .*{message}"):
        read_of(content)
