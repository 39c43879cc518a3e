"""Things that take long to make, once for all who use them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

_Key = TypeVar("_Key")
_Thing = TypeVar("_Thing")


class Shared(Generic[_Key, _Thing]):
    """The things in use, and the last ones, up to a weight in all. Any thread."""

    def __init__(self, most_kept: int, weigh: Callable[[_Key], int] = lambda _: 1) -> None:
        """`weigh` tells a thing's weight by its key."""
        self._most_kept, self._weigh = most_kept, weigh
        self._making, self._keeping = threading.Lock(), threading.Lock()
        self._used = WeakValueDictionary[_Key, _Thing]()
        self._kept: dict[_Key, _Thing] = {}
        """The thing that was used last is last."""

    def get(self, key: _Key, make: Callable[[], _Thing]) -> _Thing:
        """The thing with this key. One is made at a time."""
        thing = self._used.get(key)  # without the lock, which may be held for long
        if thing is None:
            with self._making:
                thing = self._used.get(key)
                if thing is None:
                    thing = self._used[key] = make()
        if self._weigh(key) <= self._most_kept:
            self._keep(key, thing)
        return thing

    def _keep(self, key: _Key, thing: _Thing) -> None:
        with self._keeping:
            self._kept.pop(key, None)
            self._kept[key] = thing
            while sum(map(self._weigh, self._kept)) > self._most_kept:
                del self._kept[next(iter(self._kept))]
