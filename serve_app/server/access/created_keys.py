"""API keys that operators make while the server runs, in a file beside the ledger."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    InvalidRequestError,
    ObjectNotFoundError,
    StorageFullError,
)
from serve_app.base.sharing.locks import lock
from serve_app.config.keys import ApiKey
from serve_app.config.problems import describe_errors
from serve_app.server.http import request_model
from serve_app.server.model_registry import Models

MOST_KEYS = 1000
MOST_FILE_BYTES = 16 * 2**20
"""The longest file of keys."""
_NAME = re.compile(r"[\w.@+-]{1,128}")
_NO_HASH = "0" * 64
_KEYS = TypeAdapter(list[ApiKey])


def new_key(_: Models, fields: dict[str, Any]) -> ApiKey:
    """POST /v1/keys: the entry of a key, without its hash. Raises InvalidRequestError."""
    for name in ("key", "sha256", "created"):
        if name in fields:
            raise InvalidRequestError("The server makes the key.", name)
    try:
        key = ApiKey.model_validate(fields | {"sha256": _NO_HASH})
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise request_model.invalid(problem["loc"], problem["msg"]) from None
    if not _NAME.fullmatch(key.name):
        raise InvalidRequestError(
            "A name has 128 characters at most: letters, digits, and any of _.@+-", "name"
        )
    return key


def with_secret(key: ApiKey) -> tuple[ApiKey, str]:
    """The entry with the hash of a new secret, and the secret."""
    secret = f"sk-corral-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return key.model_copy(update={"sha256": digest, "created": datetime.now(UTC)}), secret


def read_file(path: Path) -> bytes:
    """The contents of a file of keys. Raises OSError, also for what is no file, which nobody waits for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is no ordinary file")
        if status.st_size > MOST_FILE_BYTES:
            raise OSError(errno.EFBIG, f"It has more than {MOST_FILE_BYTES} bytes")
        return file.read()


class CreatedKeys:
    """The file of keys, which all ingresses share. Who changes it has the lock of a file beside it. Any
    thread.

    A key can be revoked while the disk is full. The version before the newest one stays: the next one is
    written in its place.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"

    def read(self) -> list[ApiKey]:
        """The keys; none without a file. Raises ConfigError, whose cause is an OSError if the file could
        not be read."""
        try:
            return _KEYS.validate_json(read_file(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{self.path}: {describe_errors(error)}") from None

    def add(self, key: ApiKey) -> None:
        """Add a key. Raises InvalidRequestError if there is one of its name, or no room. All changes raise
        StorageFullError or CorralError if the file cannot be written."""
        with self._changing() as keys:
            if key.name in keys:
                raise InvalidRequestError(f"There is a key {key.name!r}.", "name")
            if len(keys) >= MOST_KEYS:
                raise InvalidRequestError(f"There are {MOST_KEYS} keys. Revoke some.")
            keys[key.name] = key

    def rotate(self, name: str) -> tuple[ApiKey, str]:
        """Give a key a new secret, and return both. Raises ObjectNotFoundError."""
        with self._changing() as keys:
            keys[name], secret = with_secret(_find_key(keys, name))
        return keys[name], secret

    def revoke(self, name: str) -> None:
        """Remove a key. Raises ObjectNotFoundError."""
        with self._changing() as keys:
            del keys[_find_key(keys, name).name]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ApiKey]]:
        """The keys by their names, which are written when the block has changed them."""
        try:
            descriptor = lock(self.path.with_name(f"{self.path.name}.lock"), fcntl.LOCK_EX)
            try:
                keys = {key.name: key for key in self.read()}
                yield keys
                self._write(list(keys.values()))
            finally:
                os.close(descriptor)
        except ConfigError as error:
            raise CorralError(f"The keys cannot be read: {error.message}") from None
        except OSError as error:
            raise StorageFullError(f"The keys cannot be kept: {error.strerror}.") from None

    def _write(self, keys: list[ApiKey]) -> None:
        entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
        content = json.dumps(entries).encode()
        new, before = (self.path.with_name(f"keys.json.{name}") for name in ("new", "before"))
        with _with_room(new, len(content)) as file:
            file.write(content)
            file.truncate()
            now = time.time_ns()  # the kernel's clock for files may stand still for milliseconds
            os.utime(file.fileno(), ns=(now, now))
            os.fsync(file.fileno())
        before.unlink(missing_ok=True)
        with suppress(OSError):  # the first version, or a file system where a file has one name
            before.hardlink_to(self.path)
        new.replace(self.path)
        with suppress(OSError):
            before.replace(new)
        with suppress(OSError):
            _with_room(new, len(content)).close()


def _with_room(path: Path, n_bytes: int) -> FileIO:
    """The file, unbuffered, with room for so many bytes. Raises OSError."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o600), "w")
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError:
        file.close()
        raise
    return file


def _find_key(keys: dict[str, ApiKey], name: str) -> ApiKey:
    if name not in keys:
        raise ObjectNotFoundError(
            f"No key {name[:128]!r} was made here. Keys of the key file stay."
        )
    return keys[name]
