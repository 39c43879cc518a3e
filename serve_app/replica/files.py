"""The files that a replica needs, on its node."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from serve_app.config.sources import DownloadsConfig, ModelSource
from serve_app.progress import Report, Stage, nowhere
from serve_app.store.models import locate
from serve_app.store.sharing import ClusterSharing


class Files:
    """Finds files, with the help of other nodes. Used in a replica's event loop."""

    def __init__(self, downloads: DownloadsConfig, report: Report = nowhere) -> None:
        """`report` is told how far downloads are."""
        self._downloads, self._report = downloads, report
        self.n_bytes: Counter[str] = Counter()
        """Bytes that came for this replica: from the "origin", or from other "nodes"."""

    async def find(self, source: ModelSource) -> Path:
        """The file, on this node. Raises ConfigError."""
        last = Stage("downloading")

        def take(stage: Stage) -> None:
            nonlocal last
            last = stage
            self._report(stage)

        path = await asyncio.to_thread(locate, source, self._downloads, take, ClusterSharing())
        self.n_bytes.update(origin=last.from_origin_bytes, nodes=last.from_nodes_bytes)
        return path
