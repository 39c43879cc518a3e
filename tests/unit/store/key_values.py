"""A stand-in for what Ray's nodes share."""

from __future__ import annotations

import pytest

from serve_app.store import shared_entries


class KeyValues:
    """As `ray.experimental.internal_kv`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_away = False

    def _internal_kv_list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        if self.is_away:
            raise RuntimeError("Ray's head is away.")
        return [key for key in self.values if key.startswith(prefix)]

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        existed = key in self.values
        if overwrite or not existed:
            self.values[key] = value
        return existed

    def _internal_kv_del(self, key: bytes, namespace: bytes) -> int:
        return 0 if self.values.pop(key, None) is None else 1


def shared(monkeypatch: pytest.MonkeyPatch) -> KeyValues:
    """What is shared from now on."""
    found = KeyValues()
    monkeypatch.setattr(shared_entries, "internal_kv", found)
    return found
