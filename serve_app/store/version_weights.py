"""The weights of a model's versions, as they were changed while serving: the same for all ingresses.

They are kept where Ray's nodes keep what they share, and last as long as the cluster's head. The newest
change counts, unless the configuration's weights are others than those that it changed: then these do. All
functions ask Ray's head, block meanwhile, and raise what that raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ray.experimental import internal_kv

MOST = 32
"""Changes of one model that are remembered."""
_NAMESPACE = b"corral"

Weights = Mapping[str, float]
"""By the names of versions."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """One change of a model's weights."""

    number: int
    weights: Weights
    configured: Weights
    """The configuration's, when it was made."""


class VersionWeights:
    """Those of one application."""

    def __init__(self, app: str) -> None:
        self._prefix = f"versions/{app}/"

    def newest(self, model: str) -> WeightChange | None:
        """The last change, if there was one."""
        numbers = self._numbers(model)
        return self._read(model, numbers[-1]) if numbers else None

    def history(self, model: str) -> list[WeightChange]:
        """All that are remembered, the newest first."""
        found = (self._read(model, number) for number in reversed(self._numbers(model)))
        return [one for one in found if one is not None]

    def add(self, model: str, weights: Weights, configured: Weights) -> WeightChange:
        """A change. Of two that are made at once, the later one counts."""
        numbers = self._numbers(model)
        number = numbers[-1] + 1 if numbers else 0
        told = json.dumps({"weights": dict(weights), "configured": dict(configured)}).encode()
        while not self._put(self._key(model, number), told):
            number += 1  # somebody else was faster
        for old in numbers[: -MOST + 1]:
            internal_kv._internal_kv_del(self._key(model, old), namespace=_NAMESPACE)
        return WeightChange(number, weights, configured)

    def _put(self, key: bytes, value: bytes) -> bool:
        """Whether it is new."""
        return not internal_kv._internal_kv_put(key, value, False, namespace=_NAMESPACE)

    def _read(self, model: str, number: int) -> WeightChange | None:
        value = internal_kv._internal_kv_get(self._key(model, number), namespace=_NAMESPACE)
        told = {} if value is None else json.loads(value)
        return WeightChange(number, told["weights"], told["configured"]) if told else None

    def _numbers(self, model: str) -> list[int]:
        listed = internal_kv._internal_kv_list(self._of(model), namespace=_NAMESPACE)
        return sorted(int(key.rpartition(b"/")[2]) for key in listed)

    def _key(self, model: str, number: int) -> bytes:
        return self._of(model) + str(number).encode()

    def _of(self, model: str) -> bytes:
        return f"{self._prefix}{model.replace('/', '%')}/".encode()
