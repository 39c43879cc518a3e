"""A stand-in for what processes share."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from serve_app.store import shared_entries


class KeyValues:
    """The values of a cluster whose head may be away."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_away = False

    def list(self, prefix: str) -> Iterable[str]:
        if self.is_away:
            raise RuntimeError("Ray's head is away.")
        return [key for key in self.values if key.startswith(prefix)]

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        existed = key in self.values
        if overwrite or not existed:
            self.values[key] = value
        return existed

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


def shared(monkeypatch: pytest.MonkeyPatch) -> KeyValues:
    """What is shared from now on."""
    found = KeyValues()
    monkeypatch.setattr(shared_entries, "_values", found)
    return found
