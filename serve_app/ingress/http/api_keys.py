"""API keys from a file, and what each may use and has used."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from serve_app.config import validation
from serve_app.errors import (
    AuthenticationError,
    ConfigError,
    KeyLimitError,
    NoRoomError,
    RateLimitError,
)

logger = logging.getLogger("corral.ingress")

Clock = Callable[[], float]


class ApiKey(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1)]
    """Whose key it is. Slots are shared fairly among names."""
    key: Annotated[str, Field(min_length=16, repr=False)]
    """The secret, of 16 characters at least."""
    max_concurrent_requests: PositiveInt | None = None
    """POSTs that may run at once. Each ingress replica counts for itself, and each answer of `n` is one."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers together, for each ingress replica."""
    max_prompt_tokens: PositiveInt | None = None
    """Tokens of all prompts of a request together."""
    cache_group: Annotated[str, Field(min_length=1)] | None = None
    """Keys of one group start from each other's cached prefixes. Default: the key's own name."""
    min_priority: int = 0
    """The lowest `priority` that its requests may have. Lower values go first."""
    admin: bool = False
    """Whether the key may do what operators do, and see what others do."""


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


RETRY_S = 1
"""The shortest time that a refused client is told to wait."""
FORGIVEN_S = 5
"""A key's debt is forgotten after so many further seconds without a request."""


class Account:
    """The present use of a key. Only in the ingress's event loop, and for its replica only.

    The tokens of a minute are a bucket that fills all the time. Answers, whose length nobody knows
    before, may overdraw it; the next request waits until it is filled again.
    """

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._n_running = 0
        self._spent = 0.0
        """Tokens that are missing in the bucket."""
        self._filled = clock()
        self._refused_until = -math.inf

    def refused(self) -> None:
        """There was no room for one of its requests. Until one has been answered, or none has come for
        some seconds, they are refused at the door but for one in the shortest time that anybody is told to
        wait: each would cost more than to answer those who wait."""
        self._refused_until = self._clock() + RETRY_S

    def served(self) -> None:
        """One of its requests has an answer, so there may be room again."""
        self._refused_until = -math.inf

    def enter(self, n: int = 1, *, besides: int = 0) -> None:
        """So many requests begin, `besides` some that run already and belong to them. Raises KeyLimitError
        for more than the key may ever have, RateLimitError if too many run, and NoRoomError if there was no
        room a moment ago. Otherwise `leave` ends them."""
        if not besides:
            self._check_door()
        most = self.key.max_concurrent_requests
        if most is not None and n + besides > most:
            raise KeyLimitError(
                f"The request asks for {n + besides} answers. This API key allows {most}."
            )
        if most is not None and self._n_running + n > most:
            raise RateLimitError(
                f"This API key allows {most} requests at once, and {self._n_running} are running.",
                1,
            )
        self._n_running += n

    def _check_door(self) -> None:
        """Raises NoRoomError if there was no room a moment ago, and another request has just tried."""
        now = self._clock()
        if now < self._refused_until:
            raise NoRoomError(
                "A moment ago there was no room for more requests of this API key. Wait the seconds that "
                "`Retry-After` gives.",
                RETRY_S,
            )
        if now < self._refused_until + FORGIVEN_S:
            self._refused_until = now + RETRY_S

    def leave(self, n: int = 1) -> None:
        """So many requests have ended."""
        self._n_running -= n

    def check_prompt(self, n_prompt: int) -> None:
        """Raises KeyLimitError if a request's prompts are longer than this key's may be."""
        key = self.key
        if key.max_prompt_tokens is not None and n_prompt > key.max_prompt_tokens:
            raise KeyLimitError(
                f"The request has {n_prompt} prompt tokens. This API key allows "
                f"{key.max_prompt_tokens}."
            )

    def admit(self, n_prompt: int) -> None:
        """Charge a request's prompts. Raises KeyLimitError if they are longer than this key's may be,
        RateLimitError if there are not so many tokens left."""
        self.check_prompt(n_prompt)
        key = self.key
        if key.tokens_per_minute is not None:
            self._refill(key.tokens_per_minute)
            wanted = min(n_prompt, key.tokens_per_minute)
            missing = self._spent + wanted - key.tokens_per_minute
            if missing > 0:
                raise RateLimitError(
                    f"This API key has used up its {key.tokens_per_minute} tokens per minute.",
                    math.ceil(60 * missing / key.tokens_per_minute),
                )
        self.charge(n_prompt)

    def refund(self, n_tokens: int) -> None:
        """So many tokens that were charged were not used."""
        if self.key.tokens_per_minute is not None:
            self._spent = max(0.0, self._spent - n_tokens)

    def charge(self, n_tokens: int) -> None:
        """So many tokens were used."""
        if self.key.tokens_per_minute is not None:
            self._spent += n_tokens

    def _refill(self, per_minute: int) -> None:
        now = self._clock()
        self._spent = max(0.0, self._spent - (now - self._filled) * per_minute / 60)
        self._filled = now


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
        """Of the key with that name, if there is one."""
        self._follow()
        return self._accounts.get(name)

    def find(self, secret: str | None) -> Account:
        """Whose key this is. Raises AuthenticationError. How long that takes does not depend on how much
        of a key is right."""
        self._follow()
        if secret is None:
            raise AuthenticationError(
                "No API key was sent. Send the header 'Authorization: Bearer KEY'."
            )
        digest = _digest(secret)
        found = [account for own, account in self._digests if hmac.compare_digest(own, digest)]
        if not found:
            raise AuthenticationError("The API key is not valid here.")
        return found[0]

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
            found = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

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
