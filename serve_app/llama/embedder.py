"""The second context on a model's weights, which computes embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.formats import Row
from serve_app.llama.model import Model


class Embedder:
    """Gives a vector for each token of some texts. Only one thread, always the same, may use it.

    Each text has a `seq_id`. Sequence 0 keeps what it was fed until a row at position 0 begins another text
    there; all others are empty again after every batch. Raises ConfigError if llama.cpp cannot allocate it.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_text: int,
        n_rows: int,
        n_seq_max: int,
        threads: int,
        flash_attn: bool,
        ranks: bool,
    ) -> None:
        """`n_text` is the longest text and `n_rows` the largest batch, in tokens; `n_seq_max` is the most
        texts in a batch. With `ranks`, a text's vector is one number, which a reranking model gives it."""
        self._ranks = ranks
        self._context = Context(
            model,
            ContextOptions(
                n_seq_max=n_seq_max,
                n_ctx_slot=n_text,
                n_batch=n_rows,
                n_outputs=n_rows,
                threads=threads,
                flash_attn=flash_attn,
                kv_unified=True,
                n_ctx=n_text + n_rows,
                pooling="rank" if ranks else "none",
            ),
        )

    def run(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """One forward pass over rows that all want an output, ordered by `seq_id`; blocks without the GIL.

        Shape: a vector for each row; with `ranks`, the score of its sequence's text up to here. Raises
        DecodeError; the texts of these rows are to be begun anew then.
        """
        if any(position == 0 and seq_id == 0 for _, position, seq_id, _ in rows):
            self._context.truncate(0, 0)
        seq_ids = [seq_id for _, _, seq_id, _ in rows]
        try:
            self._context.decode(rows)
            if self._ranks:
                scores = {seq_id: self._context.rank_score(seq_id) for seq_id in set(seq_ids)}
                return np.array([[scores[seq_id]] for seq_id in seq_ids], np.float32)
            return self._context.embeddings(len(rows)).copy()
        finally:
            for seq_id in set(seq_ids) - {0}:
                self._context.truncate(seq_id, 0)

    def close(self) -> None:
        """Free the context; the model stays. Idempotent."""
        self._context.close()
