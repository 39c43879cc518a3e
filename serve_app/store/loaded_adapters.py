"""The LoRA adapters that were loaded while serving: what all replicas of an application are to have.

They are kept where Ray's nodes keep what they share, one entry for each, and last as long as the
cluster's head: a replica that comes later finds them. Unloading leaves an entry without an adapter,
so that its number is not used again. All functions ask Ray's head, block meanwhile, and raise what
that raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.experimental import internal_kv

from serve_app.config.sources import AdapterConfig
from serve_app.errors import InvalidRequestError
from serve_app.types import AdapterUse

MOST = 64
"""Adapters of one model that are loaded while serving."""
_NAMESPACE = b"corral"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was loaded while serving."""

    number: int
    """Which one it was of its model, from 0 on."""
    config: AdapterConfig
    version: str
    """See AdapterUse."""

    @property
    def use(self) -> AdapterUse:
        """How requests that name it have it."""
        return AdapterUse(self.config.id, self.config.scale, self.version)


class LoadedAdapters:
    """Those of one application."""

    def __init__(self, app: str) -> None:
        self._prefix = f"adapters/{app}/"

    def read(self, model_id: str) -> tuple[LoadedAdapter, ...]:
        """Those of a model, by their numbers."""
        return tuple(one for one in self._entries(model_id).values() if one is not None)

    def add(self, model_id: str, config: AdapterConfig, version: str) -> LoadedAdapter:
        """Have one more, for all. Raises InvalidRequestError if its name is taken, or there are too
        many."""
        self._check_room(model_id, config.id)
        number = len(self._entries(model_id))
        while not self._put(model_id, number, config, version):  # somebody else was faster
            number += 1
        if next(one for one in self.read(model_id) if one.config.id == config.id).number != number:
            self._forget(model_id, number)
            raise _taken(config.id)
        return LoadedAdapter(number, config, version)

    def remove(self, model_id: str, adapter_id: str) -> LoadedAdapter | None:
        """Have it no more; None if there is none of that name."""
        for one in self.read(model_id):
            if one.config.id == adapter_id:
                self._forget(model_id, one.number)
                return one
        return None

    def _check_room(self, model_id: str, adapter_id: str) -> None:
        found = self.read(model_id)
        if any(one.config.id == adapter_id for one in found):
            raise _taken(adapter_id)
        if len(found) >= MOST:
            raise InvalidRequestError(f"There are {MOST} loaded adapters already.", "load")

    def _entries(self, model_id: str) -> dict[int, LoadedAdapter | None]:
        found = {}
        for key in _listed(self._key(model_id)):
            value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if value is not None:
                number = int(key.rpartition(b"/")[2])
                found[number] = _entry(number, json.loads(value))
        return dict(sorted(found.items()))

    def _put(self, model_id: str, number: int, config: AdapterConfig, version: str) -> bool:
        """False if the number is taken."""
        told = {"config": config.model_dump(mode="json", exclude_unset=True), "version": version}
        return self._write(model_id, number, told, overwrite=False)

    def _forget(self, model_id: str, number: int) -> None:
        self._write(model_id, number, {}, overwrite=True)

    def _write(
        self, model_id: str, number: int, told: Mapping[str, Any], *, overwrite: bool
    ) -> bool:
        """Whether it is new."""
        key, value = self._key(model_id) + str(number).encode(), json.dumps(told).encode()
        existed = internal_kv._internal_kv_put(key, value, overwrite, namespace=_NAMESPACE)
        return not existed

    def _key(self, model_id: str) -> bytes:
        return f"{self._prefix}{model_id.replace('/', '%')}/".encode()


def _listed(prefix: bytes) -> list[bytes]:
    return internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)


def _entry(number: int, told: Mapping[str, Any]) -> LoadedAdapter | None:
    if not told:
        return None
    return LoadedAdapter(number, AdapterConfig.model_validate(told["config"]), str(told["version"]))


def _taken(adapter_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There already is an adapter {adapter_id!r}. Unload it first.", "load"
    )
