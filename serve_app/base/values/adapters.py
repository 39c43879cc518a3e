"""The LoRA adapters of a request, and the groups of prompts that may share a cache."""

from __future__ import annotations

from typing import NamedTuple

SHARED_GROUP = "*"
"""The cache group of what all groups may start from: the system prompts of the configuration."""


class AdapterUse(NamedTuple):
    """A LoRA adapter that a request is computed with."""

    id: str
    scale: float
    version: str = ""
    """A hash of the file of an adapter that was loaded while serving: another file may get the same name
    later. Empty for the adapters of the configuration."""

    @property
    def key(self) -> str:
        return f"{self.id}@{self.version}" if self.version else self.id


Adapters = tuple[AdapterUse, ...]
"""The adapters that a request is computed with, by id and without those of scale 0; none: the model
itself."""


_ADAPTED = "\0"
"""Stands between a cache group and the adapters; neither has it."""


def adapted_group(group: str, adapters: Adapters) -> str:
    """The content group of a cache group's prompts that are computed with these adapters."""
    return group + "".join(f"{_ADAPTED}{one.key}={one.scale!r}" for one in adapters)


def adapters_of(content_group: str) -> str:
    """The adapters' part of a content group: equal for those of one step, and empty without any."""
    _, separator, used = content_group.partition(_ADAPTED)
    return separator + used


def may_start_from(group: str, held: str) -> bool:
    """Whether prompts of that content group may start from what is held for that one."""
    return held == group or (held == SHARED_GROUP and _ADAPTED not in group)
