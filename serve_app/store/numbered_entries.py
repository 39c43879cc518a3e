"""Entries about a model that all ingresses and replicas of an application are to know.

They are kept where Ray's nodes keep what they share, and last as long as the cluster's head. All methods
ask Ray's head, block meanwhile, and raise what that raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ray.experimental import internal_kv

_NAMESPACE = b"corral"

Entry = Mapping[str, Any]
"""As JSON has it."""


class NumberedEntries:
    """One kind of entries of one application. Each model's are numbered from 0 on."""

    def __init__(self, kind: str, app: str) -> None:
        self._prefix = f"{kind}/{app}/"

    def numbers(self, model: str) -> list[int]:
        """Those that there are, the lowest first."""
        listed = internal_kv._internal_kv_list(self._of(model), namespace=_NAMESPACE)
        return sorted(int(key.rpartition(b"/")[2]) for key in listed)

    def get(self, model: str, number: int) -> Entry | None:
        """One of them, if it is there."""
        value = internal_kv._internal_kv_get(self._key(model, number), namespace=_NAMESPACE)
        found: Entry | None = None if value is None else json.loads(value)
        return found

    def add(self, model: str, entry: Entry) -> int:
        """One more. Returns its number: of two that are added at once, each has its own."""
        numbers = self.numbers(model)
        number = numbers[-1] + 1 if numbers else 0
        while self._put(model, number, entry, overwrite=False):
            number += 1  # somebody else was faster
        return number

    def replace(self, model: str, number: int, entry: Entry) -> None:
        """Have another one there."""
        self._put(model, number, entry, overwrite=True)

    def remove(self, model: str, number: int) -> None:
        """Have it no more: its number may be used again if it was the highest."""
        internal_kv._internal_kv_del(self._key(model, number), namespace=_NAMESPACE)

    def _put(self, model: str, number: int, entry: Entry, *, overwrite: bool) -> bool:
        """Whether there was one already."""
        key, value = self._key(model, number), json.dumps(entry).encode()
        existed: bool = internal_kv._internal_kv_put(key, value, overwrite, namespace=_NAMESPACE)
        return existed

    def _key(self, model: str, number: int) -> bytes:
        return self._of(model) + str(number).encode()

    def _of(self, model: str) -> bytes:
        return f"{self._prefix}{model.replace('/', '%')}/".encode()
