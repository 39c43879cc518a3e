"""The ingress's Prometheus metrics of versions, through Ray's metrics API."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge


class VersionMetrics:
    """One ingress replica's. Used in its event loop."""

    def __init__(self) -> None:
        what = "The part of a model's requests that one of its versions is given now, up to 1."
        self._share = Gauge("corral_version_share", what, ("model", "version"))

    def update(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """The shares now, by model and version."""
        for model, versions in shares.items():
            for version, share in versions.items():
                self._share.set(share, {"model": model, "version": version})
