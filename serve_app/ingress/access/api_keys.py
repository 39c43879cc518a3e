"""API keys from a file, which is read again when it has changed."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.config import validation
from serve_app.errors import (
    AuthenticationError,
    ConfigError,
)
from serve_app.ingress.http.account import Account, ApiKey, Clock

logger = logging.getLogger("corral.ingress")


class KeyFile(BaseModel):
    """The file: YAML, or JSON."""

    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[ApiKey], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> KeyFile:
        for values in ([key.name for key in self.keys], [key.key for key in self.keys]):
            if len(set(values)) != len(values):
                raise ValueError("two keys have the same name, or are the same")
        return self


class KeyAccounts:
    """The accounts of a key file, which is read again when it has changed. Only in one event loop.

    Raises ConfigError if the file cannot be read or is none; when that happens later, the keys stay what
    they were, and the log says why."""

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._digests: Sequence[tuple[bytes, Account]] = ()
        self._stamp = self._read_stamp()
        self._load()

    def named(self, name: str) -> Account | None:
        """The account of the key with that name, if there is one."""
        self._follow()
        return self._accounts.get(name)

    def find(self, secret: str | None) -> Account:
        """The account of this key. Raises AuthenticationError. The time that this takes does not tell
        how much of a key is right."""
        self._follow()
        if secret is None:
            raise AuthenticationError(
                "No API key was sent. Send the header 'Authorization: Bearer KEY'."
            )
        digest = _digest(secret)
        account = [account for own, account in self._digests if hmac.compare_digest(own, digest)]
        if not account:
            raise AuthenticationError("The API key is not valid here.")
        return account[0]

    def _follow(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._load()
        except ConfigError as error:
            logger.error("%s. The previous keys stay valid.", error)
        else:
            logger.info("%s: %d API keys.", self._path, len(self._digests))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _load(self) -> None:
        keys = read(self._path)
        before, self._accounts = self._accounts, {}
        for key in keys:
            account = self._accounts[key.name] = before.get(key.name) or Account(key, self._clock)
            account.key = key
        self._digests = [(_digest(key.key), self._accounts[key.name]) for key in keys]


def read(path: Path) -> list[ApiKey]:
    """The keys in a file. Raises ConfigError, which does not show them."""
    try:
        return KeyFile.model_validate(yaml.safe_load(path.read_text())).keys
    except (OSError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise ConfigError(f"ingress.api_key_file: {path}: {reason}") from None
    except ValidationError as error:
        raise ConfigError(f"ingress.api_key_file: {path}: {validation.describe(error)}") from None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
