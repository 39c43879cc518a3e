"""API keys from a file, which is read again when it has changed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.base.errors import AuthenticationError, ConfigError
from serve_app.config.keys import ApiKey
from serve_app.config.problems import describe_errors
from serve_app.server.access.created_keys import CreatedKeys, read_file
from serve_app.server.http.request_context import Clock
from serve_app.server.usage.accounts import KeyAccount
from serve_app.server.usage.ledger import Ledger

logger = logging.getLogger("corral.ingress")

READ_S = 5.0
"""The longest time that a request waits until a changed file is read. The previous keys count then."""
_MOST_NESTED = 100
"""The deepest nesting of a key file, which has a few levels."""


class KeyFile(BaseModel):
    """The file: YAML, or JSON."""

    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[ApiKey], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> KeyFile:
        for values in ([key.name for key in self.keys], [key.digest for key in self.keys]):
            if len(set(values)) != len(values):
                raise ValueError("two keys have the same name, or are the same")
        return self


class KeyAccounts:
    """The accounts of a key file, and of keys that operators made. `follow` reads what has changed of them.
    Only in one event loop.

    Raises ConfigError if a file cannot be read or is none. When that happens later, the keys stay as they
    were, and the log says why."""

    def __init__(
        self, path: Path, ledger: Ledger | None = None, clock: Clock = time.monotonic
    ) -> None:
        """The ledger has the keys' budgets, and its folder the keys that operators made; without a ledger,
        this process alone holds budgets."""
        self._path = path
        self.ledger = ledger or Ledger()
        folder = self.ledger.folder
        self.created = None if folder is None else CreatedKeys(folder)
        """The keys that operators made, if there is a place for such."""
        self._clock = clock
        self._accounts: dict[str, KeyAccount] = {}
        self._by_digest: dict[str, KeyAccount] = {}
        self._files = {path: self._read_file}
        if self.created is not None:
            self._files[self.created.path] = self.created.read
        self._stamps: dict[Path, object] = {path: _stamp(path) for path in self._files}
        """The stamps of the files' contents that were read: taken before, and kept after that."""
        self._problems: dict[Path, str] = {}
        """The reasons why the files as they are now could not be read, which are logged once."""
        self._reading: asyncio.Task[None] | None = None
        self._keys = {path: read_keys() for path, read_keys in self._files.items()}
        self._update()

    def find_by_name(self, name: str) -> KeyAccount | None:
        """The account of a key that is valid."""
        account = self._accounts.get(name)
        return None if account is None or self._has_expired(account.key) else account

    def all_keys(self) -> list[ApiKey]:
        """All keys, also those that have expired, with hashes in the place of secrets."""
        return [account.key for account in self._accounts.values()]

    def _has_expired(self, key: ApiKey) -> bool:
        return key.expires is not None and key.expires.timestamp() <= self.ledger.clock()

    def find(self, secret: str | None) -> KeyAccount:
        """The account of this key. Raises AuthenticationError. Hashes are looked up, so how long that takes
        says nothing about secrets."""
        if secret is None:
            raise AuthenticationError(
                "No API key was sent. Send the header 'Authorization: Bearer KEY'."
            )
        account = self._by_digest.get(hashlib.sha256(secret.encode()).hexdigest())
        if account is None:
            raise AuthenticationError("The API key is not valid here.")
        if self._has_expired(account.key):
            raise AuthenticationError("The API key has expired.")
        return account

    def of_user(self, names: Sequence[str]) -> KeyAccount:
        """The account of the user that a proxy names: of the key with that name, or else with that label
        `user`. Raises AuthenticationError, also for several names."""
        name = names[0] if len(names) == 1 else None
        own = self._accounts.get(name or "")
        labelled = (one for one in self._accounts.values() if one.key.labels.get("user") == name)
        account = own or next(labelled, None)
        if name is None or account is None or self._has_expired(account.key):
            raise AuthenticationError("The user that the proxy names has no valid API key here.")
        return account

    async def follow(self) -> None:
        """Read the files that have changed, in a thread: thousands of keys take seconds, in which streams
        go on. A file that could not be read is read again at the next call, and one with wrong contents
        when it has changed. Returns after READ_S at the latest."""
        earlier = self._reading
        if earlier is None and not self._find_changes():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                if earlier is not None:  # which may have missed the last change
                    await asyncio.shield(earlier)
                if self._reading is None and self._find_changes():
                    self._reading = asyncio.create_task(self._read_changed())
                if self._reading is not None:
                    await asyncio.shield(self._reading)

    def _find_changes(self) -> dict[Path, object]:
        """The stamps of the files that are not the ones that were read."""
        stamps = {path: _stamp(path) for path in self._files}
        return {path: stamp for path, stamp in stamps.items() if stamp != self._stamps[path]}

    async def _read_changed(self) -> None:
        try:
            for path, stamp in self._find_changes().items():
                await self._read(path, self._files[path], stamp)
        finally:
            self._reading = None

    async def _read(self, path: Path, read_keys: Callable[[], list[ApiKey]], stamp: object) -> None:
        try:
            self._keys[path] = await asyncio.to_thread(read_keys)
        except ConfigError as error:
            if self._problems.get(path) != error.message:
                logger.error("%s. The previous keys stay valid.", error)
            self._problems[path] = error.message
            if isinstance(error.__cause__, OSError):
                return
        else:
            self._problems.pop(path, None)
            self._update()
        self._stamps[path] = stamp

    def _read_file(self) -> list[ApiKey]:
        keys = read_keys(self._path)
        if any(key.key is not None for key in keys):
            logger.warning(
                "%s holds API keys that can be read. `corral hash-keys %s` stores their hashes instead.",
                self._path,
                self._path,
            )
        return keys

    def _update(self) -> None:
        """Make the accounts of all keys. Where two are the same, the key file's counts."""
        before, self._accounts, self._by_digest = self._accounts, {}, {}
        for key in chain.from_iterable(self._keys.values()):
            digest = key.digest
            if key.name not in self._accounts and digest not in self._by_digest:
                account = before.get(key.name) or KeyAccount(key, self.ledger, self._clock)
                account.key = key.model_copy(update={"key": None, "sha256": digest})
                self._accounts[key.name] = self._by_digest[digest] = account
        logger.info("%d API keys.", len(self._accounts))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """The figures that change with the file's contents. Its times can be set back, but for that of the
    last change."""
    try:
        stamp = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return stamp.st_mtime_ns, stamp.st_ctime_ns, stamp.st_size, stamp.st_ino, stamp.st_dev


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a file. Raises ConfigError, which does not show them. Its cause is an OSError if the file
    could not be read."""
    where = f"ingress.api_key_file: {path}"
    try:
        text = read_file(path).decode()
        if _nesting(text) > _MOST_NESTED:
            raise ConfigError(f"{where}: it is nested too deeply")
        return KeyFile.model_validate(yaml.load(text, _LOADER)).keys
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_errors(error, KeyFile)}") from None
    except (yaml.YAMLError, ValueError):  # some texts are no dates, or no UTF-8
        raise ConfigError(f"{where}: it is not YAML") from None


def _nesting(text: str) -> int:
    """No less than the depth of a YAML text: of its brackets, and of its lines' dashes and indents."""
    depth = most = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most + max(map(len, re.findall(r"^[ ?:-]*", text, re.MULTILINE)))


def hash_keys(path: Path) -> int:
    """Replace each `key` in a file by its `sha256`, and leave the rest of the file as it is. Returns the
    number of keys. Raises ConfigError."""
    keys, text = read_keys(path), path.read_text()
    plain = [entry for entry in _entries(yaml.compose(text)) if entry[0].value == "key"]
    for name, value in reversed(plain):
        quote, digest = name.style or "", hashlib.sha256(value.value.encode()).hexdigest()
        entry = f'{quote}sha256{quote}: "{digest}"'
        text = text[: name.start_mark.index] + entry + text[value.end_mark.index :]
    hashed = path.with_name(f"{path.name}.hashed")
    try:
        hashed.touch(0o600)
        hashed.write_text(text)
        if [(key.name, key.digest) for key in read_keys(hashed)] != [
            (key.name, key.digest) for key in keys
        ]:
            raise ConfigError(f"{path}: the keys cannot be replaced. Write `sha256` by hand.")
        shutil.copystat(path, hashed)
        os.chown(hashed, path.stat().st_uid, path.stat().st_gid)
        hashed.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        hashed.unlink(missing_ok=True)
    return len(plain)


def _entries(document: Any) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    (keys,) = [value for name, value in document.value if name.value == "keys"]
    for key in keys.value:
        yield from key.value
