"""A server for clients that are not in the lock, each of which runs in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Corral, model, short_folder, stopped_at_the_end
from tests.integration.models.embedding_models import write_reranker
from tools.random_models.model import SHAPES, write_random_gguf

PING_INTERVAL_S = 1


@pytest.fixture(scope="session")
def corral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corral]:
    """ "demo" makes sense, "small" is soon full, "ranker" ranks; pings come often."""
    tiny = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(tiny, SHAPES["tiny"], "q8_0")
    ranker = tiny.with_name("ranker.gguf")
    write_reranker(ranker, template="Q: {query} D: {document} A:")
    models = [
        model(None, "demo", n_slots=4, n_ctx_slot=2048, max_waiting=16),
        model(tiny, "small", n_slots=1, n_ctx_slot=2048, max_waiting=4),
        model(ranker, "ranker", n_slots=2, n_ctx_slot=1024),
    ]
    pings: dict[str, Any] = {"sse_ping_interval_s": PING_INTERVAL_S}
    with (
        short_folder() as directory,
        stopped_at_the_end(Corral(directory, models, one_machine=True, **pings)) as server,
    ):
        yield server
