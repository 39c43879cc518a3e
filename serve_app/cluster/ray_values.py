"""The values that all processes of a Ray cluster share."""

from __future__ import annotations

from collections.abc import Iterable

from ray.experimental import internal_kv

NAMESPACE = "corral"
_NAMESPACE = NAMESPACE.encode()


class RayValues:
    """The KeyValues of processes of Ray. Methods raise Ray's errors."""

    def list(self, prefix: str) -> Iterable[str]:
        keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
        return [key.decode() for key in keys]

    def get(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)
        return value

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        return bool(
            internal_kv._internal_kv_put(key.encode(), value, overwrite, namespace=_NAMESPACE)
        )

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)
