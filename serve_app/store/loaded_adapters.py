"""The LoRA adapters that were loaded while serving: what all replicas of an application are to have.

A replica that comes later finds them. Unloading leaves an entry without an adapter, so that its number is
not used again. All functions ask Ray's head: see `serve_app.store.numbered_entries`.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.config.sources import AdapterConfig
from serve_app.errors import InvalidRequestError
from serve_app.store.numbered_entries import Entry, NumberedEntries
from serve_app.types import AdapterUse

MOST = 64
"""Adapters of one model that are loaded while serving."""
_UNLOADED: Entry = {}


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
        self._entries = NumberedEntries("adapters", app)

    def read(self, model_id: str) -> tuple[LoadedAdapter, ...]:
        """Those of a model, by their numbers."""
        numbers = self._entries.numbers(model_id)
        found = (_loaded(number, self._entries.get(model_id, number)) for number in numbers)
        return tuple(one for one in found if one is not None)

    def add(self, model_id: str, config: AdapterConfig, version: str) -> LoadedAdapter:
        """Have one more, for all. Raises InvalidRequestError if its name is taken, or there are too
        many."""
        self._check_room(model_id, config.id)
        told = {"config": config.model_dump(mode="json", exclude_unset=True), "version": version}
        number = self._entries.add(model_id, told)
        if next(one for one in self.read(model_id) if one.config.id == config.id).number != number:
            self._entries.replace(model_id, number, _UNLOADED)
            raise _taken(config.id)
        return LoadedAdapter(number, config, version)

    def remove(self, model_id: str, adapter_id: str) -> LoadedAdapter | None:
        """Have it no more; None if there is none of that name."""
        for one in self.read(model_id):
            if one.config.id == adapter_id:
                self._entries.replace(model_id, one.number, _UNLOADED)
                return one
        return None

    def _check_room(self, model_id: str, adapter_id: str) -> None:
        found = self.read(model_id)
        if any(one.config.id == adapter_id for one in found):
            raise _taken(adapter_id)
        if len(found) >= MOST:
            raise InvalidRequestError(f"There are {MOST} loaded adapters already.", "load")


def _loaded(number: int, told: Entry | None) -> LoadedAdapter | None:
    if not told:
        return None
    return LoadedAdapter(number, AdapterConfig.model_validate(told["config"]), str(told["version"]))


def _taken(adapter_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There already is an adapter {adapter_id!r}. Unload it first.", "load"
    )
