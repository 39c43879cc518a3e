"""A `llama_context`: a KV cache with a sequence for each `seq_id`, its batch buffer, its adapters."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import NDArray

from serve_app.base.errors import CacheFullError, ConfigError, DecodeCancelledError, DecodeError
from serve_app.base.formats import CacheLayout, CacheType, Row, State, ggml_type, n_bytes
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampling import cuts
from serve_app.kernels.llama.stored_weights import StoredWeights

Pooling = Literal["none", "rank"]
"""llama.cpp's pooling of a text's vectors: none, or the outputs of a classifier."""

# A sequence of which only this part is in use is copied as a state: one copy takes as long either way.
_FEW_CELLS = 1 / 4
# llama.cpp rounds a sequence's length up to this many cells.
CELL_PADDING = 256
# Bytes for which somebody who comes waits while a state is saved that nobody asked for.
_TOUCHED = 2**24
# What llama_decode returns when it finds no cells, having changed nothing; and when it was cancelled.
_CACHE_FULL, _CANCELLED = 1, 2
# What llama.cpp asks after each node of a graph whether to cancel the pass, with a pointer: `strlen`. Of an
# empty text it says 0, of one of one byte 1, whose low byte is C's true. So a byte in memory is the flag,
# and nothing of Python runs in a pass. A callback of ctypes would take the GIL a thousand times a step.
_IS_CANCELLED = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)
_POOLINGS: dict[Pooling, int] = {
    "none": llama_cpp.LLAMA_POOLING_TYPE_NONE,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}
_sample_of_few = library.brief(llama_cpp.llama_sampler_sample)
_logits_of_row = library.brief(llama_cpp.llama_get_logits_ith)
_COMPUTE_BUFFER = re.compile(r"compute buffer size = +([\d.]+) MiB")


class Adapter:
    """A low-rank change of a model's weights, from a GGUF file. Freed with the model, or before.

    Contexts may be there already, but none may compute meanwhile: they share the model's list of adapters.
    Raises ConfigError if the file is missing, damaged, or for another model.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.model = model  # llama.cpp frees the adapter with it
        if not self.path.is_file():
            raise ConfigError(f"There is no adapter file at {self.path}.")
        with library.capture_log() as lines:
            found = llama_cpp.llama_adapter_lora_init(model.pointer, os.fsencode(self.path))
        if not found:
            reason = f": {lines[-1]}" if lines else "."
            raise ConfigError(
                f"llama.cpp cannot load the adapter {self.path} for {model.path.name}{reason}"
            )
        if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(found):
            llama_cpp.llama_adapter_lora_free(found)
            raise ConfigError(
                f"The adapter {self.path} is of a kind that begins in the middle of a prompt (aLoRA), "
                "which Corral does not support."
            )
        self.pointer: Any = found
        self.address = ctypes.cast(found, ctypes.c_void_p).value or 0
        self.n_bytes = self.path.stat().st_size

    @cached_property
    def fingerprint(self) -> bytes:
        """Tells its content from other adapters'. Reads all of the file, the first time."""
        return adapter_fingerprint(self.path)

    def free(self) -> None:
        """Give its memory back. No context may have it in use, or be told to. Once."""
        llama_cpp.llama_adapter_lora_free(self.pointer)
        self.pointer, self.address = None, 0


def adapter_fingerprint(path: Path) -> bytes:
    """Tells the content of an adapter's file from that of others. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(blake2b, digest_size=16)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """The sizes of a context, and how it computes."""

    n_seq_max: int
    n_ctx_slot: int
    n_ctx_share: int | None = None
    """The cells of a sequence in a split cache; None: `n_ctx_slot`."""
    n_batch: int
    n_ubatch: int | None = None
    """Rows that llama.cpp computes at once; None: all. Layers with a window have cells for the window and
    so many more."""
    n_outputs: int | None = None
    """Rows of a batch that may want logits; None: one for each sequence."""
    threads: int
    threads_batch: int | None = None
    flash_attn: bool
    kv_unified: bool = False
    n_ctx: int | None = None
    """The cells of a unified cache; None: `n_ctx_share` for each sequence."""
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    pooling: Pooling | None = None
    """The pooling of a context that makes embeddings; every row must want them."""
    tells_hidden: bool = False
    """Whether `hidden` tells the output of the last layer."""
    n_rs_seq: int = 0
    """Past states of recurrent layers that each sequence keeps, if `Model.can_roll_back`."""
    stored_from: int | None = None
    """Batches of so many rows and more are computed over weights as the file has them; None: all are over
    those that the model has."""

    def n_cells(self, *, kv_unified: bool) -> int:
        """The cells of the cache, as llama.cpp rounds them."""
        if kv_unified and self.n_ctx:
            return _pad(self.n_ctx)
        return self.n_seq_max * _pad(self.n_ctx_share or self.n_ctx_slot)


class Context:
    """Decodes batches of rows. Only one thread, always the same, may use it; any may call `cancel`.

    The KV cache is split or unified. Split, each of `n_seq_max` sequences has `n_ctx_share` cells, and no
    sequence can take another's room. Unified, all sequences share `n_ctx` cells, and those with a
    common beginning share its cells too. Raises ConfigError when llama.cpp cannot allocate it.
    """

    _KIND = llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT

    def __init__(self, model: Model, options: ContextOptions) -> None:
        self.model, self._options = model, options
        self.pointer: Any = None
        self.n_ctx_slot, self._n_batch = options.n_ctx_slot, options.n_batch
        self._n_ctx_share = options.n_ctx_share or options.n_ctx_slot
        self._stored_from = options.stored_from or sys.maxsize
        if options.stored_from and model.stored is None:
            model.stored = StoredWeights(model)
        params = llama_cpp.llama_context_default_params()
        params.n_batch, params.n_ubatch = options.n_batch, options.n_ubatch or options.n_batch
        params.n_seq_max, params.n_rs_seq = options.n_seq_max, options.n_rs_seq
        params.n_outputs_max = min(options.n_batch, options.n_outputs or options.n_seq_max)
        params.n_threads = options.threads
        params.n_threads_batch = options.threads_batch or options.threads
        self._formats = options.cache_type_k, options.cache_type_v
        params.type_k, params.type_v = map(ggml_type, self._formats)
        params.swa_full = False
        params.no_perf = True
        params.ctx_type = self._KIND
        if options.pooling is not None:
            params.embeddings = True
            params.pooling_type = _POOLINGS[options.pooling]
        self._params = params
        self.slots_with_pending_copy: set[int] = set()
        """Sequences that the next decode reads or writes: not to be saved or restored before."""
        self._cancelled = ctypes.create_string_buffer(2)
        self._make(flash_attn=options.flash_attn, kv_unified=options.kv_unified)

    def _make(self, *, flash_attn: bool, kv_unified: bool) -> None:
        params = self._params
        params.kv_unified = kv_unified
        params.n_ctx = self._options.n_cells(kv_unified=kv_unified)
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attn
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        with library.capture_log() as lines:
            self.pointer = llama_cpp.llama_init_from_model(self.model.pointer, params)
        if not self.pointer:
            options = self._options
            raise ConfigError(
                f"llama.cpp cannot make a context of {options.n_seq_max} slots x "
                f"{self._n_ctx_share} tokens for {self.model.path.name}, the cache as "
                f"{options.cache_type_k} and {options.cache_type_v}: lower engine.n_slots "
                "or engine.n_ctx_slot."
            )
        self.compute_bytes = sum(
            int(float(found[1]) * 2**20) for found in map(_COMPUTE_BUFFER.search, lines) if found
        )
        """Bytes that llama.cpp computes in, as it says itself; 0 if it does not."""
        if self._options.tells_hidden:
            only_of_logits = self._KIND != Context._KIND
            llama_cpp_ext.llama_set_embeddings_nextn(self.pointer, True, only_of_logits)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._measure_cache(lines)
        self.can_shift = bool(llama_cpp.llama_memory_can_shift(self._memory))
        """Whether `shift` works: not with every kind of position encoding."""
        self.window = self.model.window
        self._is_recurrent = self.model.is_recurrent and self._KIND == Context._KIND
        self.n_rewind = (
            int(llama_cpp.llama_n_rs_seq(self.pointer)) if self._is_recurrent else sys.maxsize
        )
        """Last tokens of a batch's sequences that `truncate` can drop before the next batch: as many as
        recurrent layers keep past states of."""
        self._rewinds: dict[int, int] = {}
        """The last tokens that recurrent layers could drop, by sequence of the last batch."""
        self._rolled_back: set[int] = set()
        """Sequences whose recurrent layers have yet to take a past state, which the next batch does."""
        self.forgets = self._is_recurrent or 0 < self.window < self.n_ctx_slot
        """Whether some layers keep less than all tokens of a sequence, so that `truncate` often cannot."""
        all_windows = self.window * params.n_seq_max + params.n_ubatch
        self._parts_windows = kv_unified and self.window > 0 and _pad(all_windows) < params.n_ctx
        """Whether copies get window cells of their own. There are as many as windows, and those that two
        sequences share are free for nobody, even behind both windows."""
        self.portable = not (self._is_recurrent or self.window)
        """Whether states are good for other kinds of cache, too: all layers keep all tokens."""
        self._kv_unified = kv_unified
        self._states = self.portable and not kv_unified
        """Whether a sequence's state is all that a copy of it needs, and less than its cells."""
        self._copied: tuple[int, State] | None = None
        """The sequence whose state was copied last, if it has not changed since then."""
        self.slots_with_pending_copy.clear()
        self._adapters: tuple[tuple[int, float], ...] = ()
        self._views: dict[int, NDArray[np.float32]] = {}
        """Logits by their address: rows get the same ones again, and to make a view takes time."""
        llama_cpp.llama_set_abort_callback(
            self.pointer, _IS_CANCELLED, ctypes.c_void_p(ctypes.addressof(self._cancelled))
        )
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)
        for i in range(self._n_batch):
            self._batch.n_seq_id[i] = 1

    def _measure_cache(self, lines: Sequence[str]) -> None:
        model, params = self.model, self._params
        per_layer = sum(map(n_bytes, self._formats, model.layer_elements))
        layout = CacheLayout.read(lines, per_layer, params.n_seq_max)
        if layout is None:
            # An encoder has no cache. Of any other, llama.cpp should have told the size.
            per_token = model.n_layer * per_layer if self._memory else 0
            layout = CacheLayout(per_token, cache_bytes=params.n_ctx * per_token)
        self.layout = layout
        one_more = _pad(self._n_ctx_share) * self.layout.per_token + self.layout.per_sequence
        one_more += self.layout.rewind_bytes // params.n_seq_max
        one_more += min(model.window, self._n_ctx_share) * self.layout.per_window_token
        of_one = self.layout.cache_bytes // params.n_seq_max
        self.cache_bytes_per_seq = one_more if params.kv_unified else of_one
        """Bytes of one sequence's cache; of a unified one, what one sequence more would add."""

    def become(self, *, flash_attn: bool, kv_unified: bool) -> None:
        """Have another kind of attention and cache, with nothing in it. The old context is freed
        first, so there are never two caches. Raises ConfigError if llama.cpp cannot allocate the
        new one: the context is closed then, and may become another one."""
        self.close()
        self._make(flash_attn=flash_attn, kv_unified=kv_unified)

    def close(self) -> None:
        """Free context and batch; the model stays. Idempotent."""
        if self.pointer:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.pointer)
            self.pointer = None

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute a forward pass over at most `n_batch` rows; blocks for its length, without the GIL.

        Rows should be ordered by sequence id: with a split cache, llama.cpp computes runs of consecutive
        ids together. Raises CacheFullError, and changes nothing, if there are no cells for them; and
        DecodeCancelledError after `cancel(True)`. After it and any other DecodeError, some rows
        may be in the cache, for the caller to `truncate`.
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
        self._run(batch, len(rows))
        if self._is_recurrent and self.n_rewind:
            self._note_computed(rows)

    def _note_computed(self, rows: Sequence[Row]) -> None:
        """Note how far sequences can be rolled back. llama.cpp may move a sequence's present state, without
        its past ones, when it computes others. So only the last batch counts, and none that llama.cpp cut
        into pieces. Source: llama.cpp, `llama_memory_recurrent::find_slot`."""
        counts = Counter(row[2] for row in rows)
        self._rolled_back.difference_update(counts)
        is_consecutive = max(counts) - min(counts) < len(counts)
        in_one = len(set(counts.values())) == 1 and (self._kv_unified or is_consecutive)
        self._rewinds = {
            seq_id: min(self.n_rewind, n_rows - 1) for seq_id, n_rows in counts.items() if in_one
        }

    def decode_tile(
        self,
        seq_id: int,
        embeddings: NDArray[np.float32],
        positions: NDArray[np.int32],
        *,
        causal: bool,
    ) -> None:
        """Decode a picture's rows in one sequence: `embeddings` are computed in the places of their
        tokens. Their positions are of one dimension after the other. Unless it is `causal`, each row sees
        all others of the batch. No row has logits; all have
        vectors, in a context that makes embeddings."""
        n_rows = len(embeddings)
        n_positions = n_rows * self.model.n_dimensions
        if not 0 < n_rows <= self._n_batch or len(positions) != n_positions:
            raise DecodeError(f"A batch of {n_rows} embeddings at {len(positions)} positions.")
        batch, _kept = _batch_of(seq_id, embeddings, positions, wants=self._params.embeddings)
        try:
            if not causal:
                llama_cpp.llama_set_causal_attn(self.pointer, False)
            self._run(batch, n_rows)
        finally:
            if not causal:
                llama_cpp.llama_set_causal_attn(self.pointer, True)

    def _run(self, batch: llama_cpp.llama_batch, n_rows: int) -> None:
        self._copied, self._rewinds = None, {}
        if self.model.stored is not None:
            self.model.stored.use(n_rows >= self._stored_from)
        status = llama_cpp.llama_decode(self.pointer, batch)
        if status == _CACHE_FULL:
            raise CacheFullError(f"The KV cache has no room for {n_rows} tokens more.")
        if status == _CANCELLED:
            raise DecodeCancelledError(f"A batch of {n_rows} rows was cancelled.")
        if status != 0:
            raise DecodeError(f"llama_decode returned {status} for a batch of {n_rows} rows.")
        self.slots_with_pending_copy.clear()

    def use_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Decode with these adapters, each with its scale, from now on. A change makes llama.cpp build its
        graphs anew with the next `decode`."""
        used = tuple((one.address, scale) for one, scale in adapters)
        if used == self._adapters:
            return
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(used))(
            *(one.pointer for one, _ in adapters)
        )
        scales = (ctypes.c_float * len(used))(*(scale for _, scale in used))
        if llama_cpp.llama_set_adapters_lora(self.pointer, pointers, len(used), scales) != 0:
            raise DecodeError("llama.cpp does not take these adapters.")
        self._adapters = used

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have the `decode` that runs, and those to come, end after the node of the graph
        that is being computed. With False, have them compute again."""
        self._cancelled[0] = bytes([cancelled])

    def logits(self, row: int, n_highest: int | None = None) -> NDArray[np.float32]:
        """All logits of a row of the last batch that asked for them: a view, until the next `decode`."""
        pointer = _logits_of_row(self.pointer, row)
        address = ctypes.addressof(pointer.contents)
        if address not in self._views:
            self._views[address] = np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))
        return self._views[address]

    def hidden(self, n_rows: int) -> NDArray[np.float32]:
        """The outputs of the last layer for the `n_rows` rows of the last decoded batch. Only if it
        `tells_hidden`. A view, good until the next `decode`."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.pointer)
        return np.ctypeslib.as_array(pointer, shape=(n_rows, self.n_hidden))

    @property
    def n_hidden(self) -> int:
        """The numbers that `hidden` has for each row."""
        return int(llama_cpp.llama_model_n_embd_out(self.model.pointer))

    def pick(self, sampler: llama_cpp.llama_sampler_p, row: int) -> int:
        """The token that a chain of llama.cpp's samplers picks by the logits of a row of the last
        decoded batch. The logits are read as `logits` gives them."""
        is_small = self.model.n_vocab <= cuts.SMALL
        sample = _sample_of_few if is_small else llama_cpp.llama_sampler_sample
        return int(sample(sampler, self.pointer, row))

    def embeddings(self, n_rows: int) -> NDArray[np.float32]:
        """A vector for each of the `n_rows` rows that were last decoded; only without llama.cpp's own
        pooling. A view, good until the next `decode`."""
        pointer = llama_cpp.llama_get_embeddings(self.pointer)
        return np.ctypeslib.as_array(pointer, shape=(n_rows, self.model.n_embd))

    def class_outputs(self, seq_id: int) -> NDArray[np.float32]:
        """The outputs of the model's classifier for the text of one of the last batch's sequences. A view,
        good until the next `decode`."""
        n_outputs = int(llama_cpp.llama_model_n_cls_out(self.model.pointer))
        pointer = llama_cpp.llama_get_embeddings_seq(self.pointer, seq_id)
        return np.ctypeslib.as_array(pointer, shape=(n_outputs,))

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a sequence's cached tokens from position `n_past` on; 0 empties the sequence. Raises
        DecodeError, and changes nothing, where it cannot: see `can_cut`."""
        rolls_back = self._is_recurrent and 0 < n_past < self._n_past(seq_id)
        if not self.can_cut(seq_id, n_past) or not llama_cpp.llama_memory_seq_rm(
            self._memory, seq_id, n_past, -1
        ):
            raise DecodeError(
                f"llama.cpp cannot keep the first {n_past} tokens of sequence {seq_id}."
            )
        self._changes(seq_id)
        if rolls_back:
            self._rolled_back.add(seq_id)
        elif n_past == 0:
            self._rolled_back.discard(seq_id)

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        """Whether the first `n_past` tokens, and no more, can be kept: all that the next token attends to
        must be there. Recurrent layers keep the past states of a batch at most. Layers with a window
        keep little more than their last window, and a saved state just that."""
        if n_past == 0:
            return True
        if self.window:
            oldest = llama_cpp.llama_memory_seq_pos_min(self._memory, seq_id)
            if not self._is_recurrent and oldest > self.model.window_start(n_past):
                return False
        most = self._rewinds.get(seq_id, 0) if self._is_recurrent else sys.maxsize
        return self._n_past(seq_id) - n_past <= most

    def _n_past(self, seq_id: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens after the first `n_keep`, and move those behind up. llama.cpp turns
        their keys during the next decode. Only if `can_shift`."""
        self._changes(seq_id)
        self.slots_with_pending_copy.add(seq_id)
        behind = n_keep + n_discard
        llama_cpp.llama_memory_seq_rm(self._memory, seq_id, n_keep, behind)
        llama_cpp.llama_memory_seq_add(self._memory, seq_id, behind, -1, -n_discard)

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of sequence `source`, whatever it held. In a unified cache they
        share the cells. Otherwise llama.cpp copies all cells of a sequence during the next decode, which
        costs about as much as computing `n_ctx_share` / 200 tokens. Where few of them are in use, the
        source's state takes less. It is taken once for all copies that are made before the next decode.
        """
        n_past = self._n_past(source)
        settled = self.slots_with_pending_copy.isdisjoint((source, target))
        takes_few = self._states and n_past <= _FEW_CELLS * self._n_ctx_share
        # A cell that is shared would have the state before.
        rolled_back = source in self._rolled_back
        if rolled_back and not settled:
            raise DecodeError(f"Sequence {source} is still to be rolled back.")
        if settled and (takes_few or rolled_back):
            if self._copied is None or self._copied[0] != source:
                self._copied = source, self.save(source)
            self.restore(target, self._copied[1])
            return
        self._changes(target)
        self._rewinds = {}
        if not self._kv_unified:
            self.slots_with_pending_copy |= {source, target}
        self._copy_cells(source, target)
        if self._parts_windows:
            try:
                self.rewind(target, self.checkpoint(source), n_past)
            except DecodeError:
                self._copy_cells(source, target)

    def _copy_cells(self, source: int, target: int) -> None:
        self._rolled_back.discard(target)
        llama_cpp.llama_memory_seq_rm(self._memory, target, -1, -1)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def append(self, source: int, target: int) -> None:
        """Have sequence `target` attend to the cells of sequence `source`, besides its own. Only in a
        unified cache. Positions may be there twice then: good for nothing but to measure."""
        self._changes(target)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def _changes(self, seq_id: int) -> None:
        self._rewinds.pop(seq_id, None)
        if self._copied is not None and self._copied[0] == seq_id:
            self._copied = None

    def save(self, seq_id: int, behind: bytes = b"", *, cancellable: bool = False) -> memoryview:
        """A sequence's cached tokens as llama.cpp's sequence state, with so many bytes `behind` it. The
        state is for the same model and the same cache formats. Not as `bytes`: that copy would take ten
        times as long as llama.cpp does. With `cancellable`, raises DecodeCancelledError after
        `cancel(True)`."""
        return self._save(
            seq_id, llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE, behind, cancellable=cancellable
        )

    def checkpoint(self, seq_id: int) -> memoryview:
        """The part of a sequence's state that `truncate` could not have back. That is the last window
        of layers that have one, and the states of recurrent layers."""
        return self._save(seq_id, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _save(
        self, seq_id: int, flags: int, behind: bytes = b"", *, cancellable: bool = False
    ) -> memoryview:
        size = llama_cpp.llama_state_seq_get_size_ext(self.pointer, seq_id, flags)
        buffer = np.empty(size + len(behind), np.uint8)
        if cancellable:
            self._touch(buffer)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n_written = llama_cpp.llama_state_seq_get_data_ext(
            self.pointer, pointer, size, seq_id, flags
        )
        end = n_written + len(behind)
        buffer[n_written:end] = np.frombuffer(behind, np.uint8)
        return buffer[:end].data

    def _touch(self, buffer: NDArray[np.uint8]) -> None:
        """Have the system's memory for a buffer, which takes longer than to fill it, and can be left."""
        for start in range(0, buffer.size, _TOUCHED):
            if self._cancelled[0] != b"\0":
                raise DecodeCancelledError("A state was not saved.")
            buffer[start : start + _TOUCHED : mmap.PAGESIZE] = 0

    def restore(self, seq_id: int, state: State) -> None:
        """Fill a sequence with a saved state, whatever it held. Raises DecodeError if llama.cpp refuses it;
        the sequence is empty then."""
        self.truncate(seq_id, 0)
        self._restore(seq_id, state, llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE)

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        """Put a sequence back to a checkpoint that was made when it, or another one, had just its first
        `n_past` tokens. Raises DecodeError if llama.cpp refuses it; the sequence is empty then."""
        self._changes(seq_id)
        self._restore(seq_id, checkpoint, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        try:
            self.truncate(seq_id, n_past)
        except DecodeError:
            self.truncate(seq_id, 0)
            raise

    def _restore(self, seq_id: int, state: State, flags: int) -> None:
        self._rolled_back.discard(seq_id)
        pointer = np.frombuffer(state, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not llama_cpp.llama_state_seq_set_data_ext(
            self.pointer, pointer, len(state), seq_id, flags
        ):
            self.truncate(seq_id, 0)
            raise DecodeError(f"llama.cpp does not take back the saved state of sequence {seq_id}.")

    def warm_up(self) -> None:
        """Compute a throw-away batch, so that the first request does not pay for page faults."""
        llama_cpp.llama_set_warmup(self.pointer, True)
        self.decode([(0, 0, 0, True)])
        llama_cpp.llama_set_warmup(self.pointer, False)
        self.truncate(0, 0)


def _pad(n_tokens: int) -> int:
    return -(-n_tokens // CELL_PADDING) * CELL_PADDING


def _batch_of(
    seq_id: int, embeddings: NDArray[np.float32], positions: NDArray[np.int32], *, wants: bool
) -> tuple[llama_cpp.llama_batch, object]:
    """Embeddings of one sequence as a batch that wants results of all rows or of none. The second value
    must be there as long as the batch is used."""
    n_rows = len(embeddings)
    rows = np.ascontiguousarray(embeddings, np.float32)
    ids = ctypes.pointer(llama_cpp.llama_seq_id(seq_id))
    of_rows = (ctypes.POINTER(llama_cpp.llama_seq_id) * n_rows)(*[ids] * n_rows)
    counts, logits = np.ones(n_rows, np.int32), np.full(n_rows, wants, np.int8)
    batch = llama_cpp.llama_batch(
        n_tokens=n_rows,
        embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        pos=positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
        n_seq_id=counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        seq_id=ctypes.cast(of_rows, ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
        logits=logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
    )
    return batch, (rows, positions, counts, of_rows, logits)
