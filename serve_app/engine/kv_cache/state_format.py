"""The file format of a prefix: its tokens, llama.cpp's state of them, and its checkpoints.

It is what `_FIELDS` names, a checksum of all the rest, the cache group, the tokens, the state, what
`_CHECKPOINT` names of each checkpoint, and their states. It is checked before any of it is used: llama.cpp
believes what a state says.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from serve_app.engine.backends.base import State
from serve_app.engine.kv_cache.checkpoints import Checkpoint
from serve_app.engine.kv_cache.memory_tier import StoredPrefix
from serve_app.engine.kv_cache.packing import TOKEN_BYTES, packed, token_array

UNFINISHED = ".unfinished"
"""How names of files end that are being written."""
KEY_BYTES = 32

_MAGIC = b"CorralPx"
_VERSION = 3
_FIELDS = struct.Struct(
    "<8sI32sIQIIQ"
)  # magic, version, fingerprint, tokens, bytes of state, of group, number of checkpoints, their bytes
_CHECKPOINT = struct.Struct("<IQ")  # tokens, bytes of state
_DIGEST_BYTES = 32


class RefusedFileError(Exception):
    """A file must not be used; the message says why."""


def key_of(fingerprint: bytes) -> bytes:
    """The mark of a file: a hash of all that its state depends on."""
    return blake2b(fingerprint, digest_size=KEY_BYTES).digest()


def read(path: Path, key: bytes, room_bytes: int) -> StoredPrefix | None:
    """The prefix in a file, None if its state takes more than `room_bytes`. Raises RefusedFileError,
    OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError("it is not a file")
    with path.open("rb") as file:
        fields, checksum = file.read(_FIELDS.size), file.read(_DIGEST_BYTES)
        if len(checksum) < _DIGEST_BYTES or not fields.startswith(_MAGIC):
            raise RefusedFileError("it is not a stored prefix, or cut off in its header")
        _, version, found_key, n_tokens, n_state, n_group, n_marks, n_states = _FIELDS.unpack(
            fields
        )
        if version != _VERSION:
            raise RefusedFileError(f"it is of version {version}, this program reads {_VERSION}")
        if found_key != key:
            raise RefusedFileError("it is of another model, context or version of llama.cpp")
        n_before = _FIELDS.size + _DIGEST_BYTES + n_group + n_tokens * TOKEN_BYTES
        n_bytes = n_before + n_state + n_marks * _CHECKPOINT.size + n_states
        if status.st_size != n_bytes:
            raise RefusedFileError(f"it has {status.st_size} bytes, its header says {n_bytes}")
        if n_state + n_states > room_bytes:
            return None
        group, tokens = file.read(n_group), file.read(n_tokens * TOKEN_BYTES)
        state, table = file.read(n_state), file.read(n_marks * _CHECKPOINT.size)
        states = file.read(n_states)
    if _checksum(fields, group, tokens, state, table, states) != checksum:
        raise RefusedFileError("its checksum is wrong")
    marks = _checkpoints(table, memoryview(states), n_tokens)
    return StoredPrefix(token_array(tokens), state, group.decode(), marks)


def _checkpoints(table: bytes, states: memoryview, n_tokens: int) -> tuple[Checkpoint, ...]:
    """Reads the checkpoints of a file. Raises RefusedFileError if they are none of so many
    tokens."""
    marks, at = list[Checkpoint](), 0
    for n, size in _CHECKPOINT.iter_unpack(table):
        marks.append(Checkpoint(n, bytes(states[at : at + size])))
        at += size
    lengths = [0, *(one.n_tokens for one in marks), n_tokens + 1]
    if at != len(states) or any(n >= longer for n, longer in pairwise(lengths)):
        raise RefusedFileError("its checkpoints are not of its tokens")
    return tuple(marks)


def size_of(prefix: StoredPrefix) -> int:
    """Bytes of the file that `write` would make."""
    n_group, n_tokens = len(prefix.group.encode()), len(prefix.tokens)
    n_before = _FIELDS.size + _DIGEST_BYTES + n_group + n_tokens * TOKEN_BYTES
    return n_before + prefix.n_bytes + len(prefix.checkpoints) * _CHECKPOINT.size


def write(path: Path, key: bytes, prefix: StoredPrefix) -> int:
    """Make a file, whole or not at all, which nobody but the owner can read; returns its bytes. Raises
    OSError."""
    group, tokens, marks = prefix.group.encode(), packed(prefix.tokens), prefix.checkpoints
    n_states = prefix.n_bytes - len(prefix.state)
    sizes = (len(prefix.tokens), len(prefix.state), len(group), len(marks), n_states)
    fields = _FIELDS.pack(_MAGIC, _VERSION, key, *sizes)
    table = b"".join(_CHECKPOINT.pack(one.n_tokens, len(one.state)) for one in marks)
    body = (group, tokens, prefix.state, table, *(one.state for one in marks))
    checksum = _checksum(fields, *body)
    descriptor, unfinished = tempfile.mkstemp(UNFINISHED, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((fields, checksum, *body))
            file.flush()
            os.fsync(descriptor)
            n_bytes = file.tell()
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return n_bytes


def _checksum(*parts: State) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
