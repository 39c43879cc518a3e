"""The second context on a model's weights: it reads texts, and writes none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serve_app.llama.context import Context, Row
from serve_app.llama.model import Model


class Embedder:
    """Gives a vector for each token of some texts. Only one thread, always the same, may use it.

    Each text has a lane. Lane 0 keeps what it was fed until a row at position 0 begins another text there;
    all other lanes are empty again after every pass. Raises ConfigError when llama.cpp cannot allocate it.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_text: int,
        n_rows: int,
        n_lanes: int,
        threads: int,
        flash_attn: bool,
        ranks: bool,
    ) -> None:
        """`n_text` is the longest text, `n_rows` the largest pass, in tokens. With `ranks`, each text's
        vector is the one number that a reranking model gives it."""
        self._ranks = ranks
        self._context = Context(
            model,
            n_seq_max=n_lanes,
            n_ctx_slot=n_text,
            n_batch=n_rows,
            n_outputs=n_rows,
            threads=threads,
            flash_attn=flash_attn,
            kv_unified=True,
            n_ctx=n_text + n_rows,
            pooling="rank" if ranks else "none",
        )

    def run(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """One forward pass over rows that all want an output, ordered by lane; blocks without the GIL.

        Shape: a vector for each row; with `ranks`, the score of its lane's text up to here. Raises
        DecodeError; the texts of these rows are to be begun anew then.
        """
        if any(position == 0 and lane == 0 for _, position, lane, _ in rows):
            self._context.truncate(0, 0)
        lanes = [lane for _, _, lane, _ in rows]
        try:
            self._context.decode(rows)
            if self._ranks:
                scores = {lane: self._context.rank_score(lane) for lane in set(lanes)}
                return np.array([[scores[lane]] for lane in lanes], np.float32)
            return self._context.embeddings(len(rows)).copy()
        finally:
            for lane in set(lanes) - {0}:
                self._context.truncate(lane, 0)

    def close(self) -> None:
        """Free the context; the model stays. Idempotent."""
        self._context.close()
