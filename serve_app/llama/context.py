"""One `llama_context` with a KV cache lane for each sequence, and the batch buffer that feeds it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from serve_app.errors import ConfigError, DecodeError
from serve_app.llama.formats import CacheType, ggml_type, n_bytes
from serve_app.llama.model import Model

Row = tuple[int, int, int, bool]
"""(token, position, sequence id, wants logits): one row of a batch."""

# llama.cpp rounds a lane's length up to this many cells.
_CELL_PADDING = 256


class Context:
    """Decodes batches of rows. Only one thread, always the same, may use it.

    The KV cache is split: each of `n_seq_max` lanes has `n_ctx_slot` cells of its own, so that one
    sequence can never take another's room. Raises ConfigError when llama.cpp cannot allocate it.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_seq_max: int,
        n_ctx_slot: int,
        n_batch: int,
        threads: int,
        flash_attn: bool,
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
    ) -> None:
        self.model = model
        self.n_ctx_slot = n_ctx_slot
        self._n_batch = n_batch
        params = llama_cpp.llama_context_default_params()
        cells = -(-n_ctx_slot // _CELL_PADDING) * _CELL_PADDING
        params.n_ctx = n_seq_max * cells
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = n_seq_max
        # At most one row of each sequence is sampled: llama.cpp need not reserve logits for more.
        params.n_outputs_max = n_seq_max
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attn
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k, params.type_v = ggml_type(cache_type_k), ggml_type(cache_type_v)
        params.kv_unified = False
        params.no_perf = True
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise ConfigError(
                f"llama.cpp cannot make a context of {n_seq_max} slots x {n_ctx_slot} tokens for "
                f"{model.path.name}, the cache as {cache_type_k} and {cache_type_v}: lower "
                "engine.n_slots or engine.n_ctx_slot."
            )
        keys, values = model.cache_elements
        self.cache_bytes_per_token = n_bytes(cache_type_k, keys) + n_bytes(cache_type_v, values)
        """Bytes of one token's keys and values."""
        self.cache_bytes_per_lane = cells * self.cache_bytes_per_token
        """Bytes of one lane's keys and values."""
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        for i in range(n_batch):
            self._batch.n_seq_id[i] = 1

    def close(self) -> None:
        """Free context and batch; the model stays. Idempotent."""
        if self.pointer:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.pointer)
            self.pointer = None

    def decode(self, rows: Sequence[Row]) -> None:
        """One forward pass over at most `n_batch` rows; blocks for its length, without the GIL.

        Rows should be ordered by sequence id: llama.cpp computes runs of consecutive ids together.
        Raises DecodeError; what the failed call left in the cache is for the caller to `truncate`.
        """
        if not 0 < len(rows) <= self._n_batch:  # llama.cpp would abort the whole process
            raise DecodeError(
                f"A batch of {len(rows)} rows; this context takes 1 to {self._n_batch}."
            )
        batch = self._batch
        token, pos, seq_id, logits = batch.token, batch.pos, batch.seq_id, batch.logits
        for i, row in enumerate(rows):
            token[i], pos[i], seq_id[i][0], logits[i] = row
        batch.n_tokens = len(rows)
        status = llama_cpp.llama_decode(self.pointer, batch)
        if status != 0:
            raise DecodeError(f"llama_decode returned {status} for a batch of {len(rows)} rows.")

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a sequence's cached tokens from position `n_past` on; 0 empties its lane."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq_id, n_past, -1):
            raise DecodeError(f"llama.cpp cannot keep the first {n_past} tokens of lane {seq_id}.")

    def copy(self, source: int, target: int) -> None:
        """Make lane `target` a copy of lane `source`. llama.cpp copies all of the lane's cells
        during the next decode, so until then neither may be saved or restored. That costs about as much
        as computing `n_ctx_slot` / 400 tokens."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def save(self, seq_id: int) -> bytes:
        """A lane's cached tokens as llama.cpp's sequence state, to be used with the same model and the
        same cache formats."""
        size = llama_cpp.llama_state_seq_get_size(self.pointer, seq_id)
        buffer = np.empty(size, np.uint8)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n_written = llama_cpp.llama_state_seq_get_data(self.pointer, pointer, size, seq_id)
        return buffer[:n_written].tobytes()

    def restore(self, seq_id: int, state: bytes) -> None:
        """Fill a lane with a saved state, whatever it held. Raises DecodeError if llama.cpp refuses it;
        the lane is empty then."""
        self.truncate(seq_id, 0)
        pointer = np.frombuffer(state, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not llama_cpp.llama_state_seq_set_data(self.pointer, pointer, len(state), seq_id):
            self.truncate(seq_id, 0)
            raise DecodeError(f"llama.cpp does not take back the saved state of lane {seq_id}.")

    def warm_up(self) -> None:
        """One throw-away decode, so that the first request does not pay for page faults."""
        llama_cpp.llama_set_warmup(self.pointer, True)
        self.decode([(0, 0, 0, True)])
        llama_cpp.llama_set_warmup(self.pointer, False)
        self.truncate(0, 0)
