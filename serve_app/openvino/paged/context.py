"""A model compiled by OpenVINO with paged attention: any rows of any sequences in one pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from serve_app.errors import ConfigError, DecodeCancelledError, DecodeError
from serve_app.llama.formats import Row
from serve_app.llama.model import Model
from serve_app.llama.sampling.candidates import Candidates
from serve_app.openvino.paged import compiling, shifts
from serve_app.openvino.paged.blocks import BLOCK, BlockTables

_ALIGNMENT = 64
_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedOptions:
    """The sizes of a paged context, and how it computes."""

    n_sequences: int
    n_ctx_slot: int
    n_blocks: int
    threads: int
    n_texts: int = 0
    n_text_blocks: int = 0
    frequencies: NDArray[np.float32] | None = None
    cache_type: compiling.CacheType = "f16"


class PagedContext:
    """Decodes batches of rows. Only one thread, always the same, may use it; any may call `cancel`.

    Sequences share blocks of `BLOCK` tokens where they are copies of each other. Raises ConfigError if the
    model cannot be compiled.
    """

    def __init__(self, path: Path, model: Model, options: PagedOptions) -> None:
        """`model` has the vocabulary; its weights are not used."""
        self.model = model
        self.n_ctx_slot = options.n_ctx_slot
        n_blocks, n_text_blocks = options.n_blocks, options.n_text_blocks
        self._weights = path.with_suffix(".bin")
        self.n_parameter_bytes = self._weights.stat().st_size
        graph = compiling.read(
            path, options.frequencies, model.n_vocab
        )  # which has the file mapped
        with compiling.forgetting(self._weights):
            executable, self.frequencies = compiling.compiled(
                path, graph, options.threads, options.cache_type, options.n_ctx_slot
            )
        self._request: openvino.InferRequest | None = executable.create_infer_request()
        try:
            self._caches = {
                one.any_name: self._cache(self._request, one, n_blocks + n_text_blocks)
                for one in executable.inputs
                if one.any_name.startswith(compiling.CACHES)
            }
        except MemoryError:
            raise ConfigError(
                f"There is no memory for a KV cache of {n_blocks * BLOCK} tokens: lower engine.n_slots or "
                "engine.n_ctx_slot."
            ) from None
        self._n_blocks = n_blocks
        self._tables = BlockTables(options.n_sequences, range(n_blocks))
        self._texts = BlockTables(options.n_texts, range(n_blocks, n_blocks + n_text_blocks))
        self._outputs: dict[int, int] = {}
        self._logits: NDArray[np.float32] = np.empty((0, model.n_vocab), np.float32)
        self._cancelled = threading.Event()

    @staticmethod
    def _cache(request: openvino.InferRequest, port: Any, n_blocks: int) -> NDArray[Any]:
        shape = [one.get_length() if one.is_static else 0 for one in port.partial_shape]
        shape[0] = n_blocks
        if len(shape) != 4 or shape[2] not in (0, BLOCK):
            raise ConfigError(f"OpenVINO's cache has an unknown layout: {port.partial_shape}.")
        shape[2] = BLOCK
        kind = port.element_type
        cells = _zeros(shape, shifts.BF16 if kind == openvino.Type.bf16 else kind.to_dtype())
        tensor = openvino.Tensor(cells, openvino.Shape(shape), kind)
        request.set_tensor(port.any_name, tensor)
        return cells

    @property
    def cache_bytes(self) -> int:
        """The size of all blocks but those for texts, whose memory is the system's until it is used."""
        return self._n_blocks * self.block_bytes

    @property
    def n_tokens(self) -> int:
        """The tokens that all blocks have room for."""
        return self._n_blocks * BLOCK

    @property
    def block_bytes(self) -> int:
        """The size of one block."""
        return sum(one[0].nbytes for one in self._caches.values())

    def warm_up(self) -> None:
        """Compute a row and forget it. For it, the kernels put the weights into an order of their own, so
        the file's pages are not needed any more."""
        with compiling.forgetting(self._weights):
            self.decode([(0, 0, 0, True)])
        self.truncate(0, 0)

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute a forward pass; blocks for its length, without the GIL. Raises CacheFullError, and
        changes nothing, if there are no blocks for the rows; DecodeCancelledError after `cancel(True)`, and
        another DecodeError if they cannot be computed: the cache is then as it was."""
        self._logits, self._outputs = self._pass(
            rows, self._tables, compiling.SAMPLED, compiling.LOGITS
        )

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """A vector for each row, from a pass over texts. Text 0 is kept until a row at position 0 begins
        another; the others are forgotten. Raises as `decode`."""
        if any(position == 0 and text == 0 for _, position, text, _ in rows):
            self._texts.truncate(0, 0)
        try:
            vectors, outputs = self._pass(rows, self._texts, compiling.EMBEDDED, compiling.VECTORS)
            return vectors[[outputs[i] for i in range(len(rows))]]
        finally:
            for text in {row[2] for row in rows} - {0}:
                self._texts.truncate(text, 0)

    def _pass(
        self, rows: Sequence[Row], tables: BlockTables, chosen: str, output: str
    ) -> tuple[NDArray[np.float32], dict[int, int]]:
        """The output for the rows that want logits, which the input `chosen` names, and where in it each
        of them is. If the rows cannot be computed, the tables are as before."""
        by_sequence: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_sequence.setdefault(row[2], []).append(i)
        before = {sequence: tables.length(sequence) for sequence in by_sequence}
        for sequence, indices in by_sequence.items():
            positions = [rows[i][1] for i in indices]
            if positions != list(range(before[sequence], before[sequence] + len(indices))):
                raise DecodeError("Rows must continue their sequence.")
        more = {sequence: len(indices) for sequence, indices in by_sequence.items()}
        for source, target in tables.extend(more):
            for cache in self._caches.values():
                cache[target] = cache[source]
        order = [i for indices in by_sequence.values() for i in indices]
        wanted = [at for at, i in enumerate(order) if rows[i][3]] or [len(order) - 1]
        blocks = [tables.blocks(sequence) for sequence in by_sequence]
        longest = max(tables.length(sequence) for sequence in by_sequence)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array([rows[i][0] for i in order], np.int64),
            "position_ids": np.array([rows[i][1] for i in order], np.int64),
            "past_lens": np.array(list(before.values()), np.int32),
            "subsequence_begins": _begins(list(more.values())),
            "block_indices": np.array([block for table in blocks for block in table], np.int32),
            "block_indices_begins": _begins([len(table) for table in blocks]),
            "max_context_len": np.array(longest, np.int32),
            compiling.SAMPLED: np.empty(0, np.int64),
            compiling.EMBEDDED: np.empty(0, np.int64),
            chosen: np.array(wanted, np.int64),
        }
        try:
            values = self._infer(inputs, output)
        except BaseException:
            for sequence, length in before.items():
                tables.truncate(sequence, length)
            raise
        return values, {order[at]: n for n, at in enumerate(wanted)}

    def _infer(self, inputs: Mapping[str, NDArray[Any]], output: str) -> NDArray[np.float32]:
        if self._cancelled.is_set():
            raise DecodeCancelledError("The pass was cancelled.")
        request = self._request
        assert request is not None
        try:
            compiling.infer(request, inputs)
        except DecodeError:
            if self._cancelled.is_set():
                raise DecodeCancelledError("The pass was cancelled.") from None
            raise
        found: NDArray[np.float32] = request.get_tensor(output).data
        return found.reshape(-1, found.shape[-1])

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have every `decode` end early, or compute again with False."""
        if cancelled:
            self._cancelled.set()
            if (request := self._request) is not None:
                request.cancel()
        else:
            self._cancelled.clear()

    def close(self) -> None:
        """Free the compiled model and the cache. Idempotent."""
        self._request = None
        self._caches = {}

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last batch that asked for them: a view, until the next `decode`."""
        found: NDArray[np.float32] = self._logits[self._outputs[row]]
        return found

    def pick(self, sampler: Any, row: int) -> int:
        """The token that a chain of llama.cpp's samplers picks by that row's logits."""
        logits = self.logits(row)
        candidates = Candidates(np.arange(logits.size), logits)
        candidates.apply(sampler)
        return candidates.picked

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a sequence's tokens from position `n_past` on."""
        self._tables.truncate(seq_id, n_past)

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of sequence `source`. It costs nothing."""
        self._tables.share(source, target)

    def pretend(self, seq_id: int, n_tokens: int) -> None:
        """Give an empty sequence so many tokens without computing them, for measurements of time. They are
        written, as memory that nobody wrote is a single page. Raises CacheFullError."""
        self._tables.extend({seq_id: n_tokens})
        blocks = self._tables.blocks(seq_id)
        for cache in self._caches.values():
            n = cache.shape[-1] - (shifts.GRID if cache.dtype == np.uint8 else 0)
            cache[blocks] = shifts.narrowed(np.ones(n, np.float32), cache.dtype)

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        """Drop `n_discard` tokens after the first `n_keep`, for each (n_keep, n_discard) in turn; those
        behind get their places. Takes time that grows with what is behind. Raises CacheFullError if its
        blocks are shared, and there are none for the copy: the sequence is cut then."""
        places = shifts.kept(self._tables.length(seq_id), cuts)
        n_before = places - np.arange(len(places))
        n_stay = int(np.count_nonzero(n_before == 0)) // BLOCK * BLOCK
        old = list(self._tables.blocks(seq_id))
        self._tables.truncate(seq_id, n_stay)
        self._tables.extend({seq_id: len(places) - n_stay})
        new = self._tables.blocks(seq_id)[n_stay // BLOCK :]
        for name, cache in self._caches.items():
            cells = shifts.cells_of(cache[old])[places[n_stay:]]
            if name.startswith(compiling.KEYS):
                cells = shifts.turned_back(cells, n_before[n_stay:], self.frequencies[name])
            cache[new] = shifts.blocks_of(cells)

    def save(self, seq_id: int, *, cancellable: bool = False) -> memoryview:
        """The sequence's tokens as a state: its length and its blocks, layer by layer. With `cancellable`,
        raises DecodeCancelledError after `cancel(True)`."""
        blocks, length = self._tables.blocks(seq_id), self._tables.length(seq_id)
        state = np.empty(_LENGTH + len(blocks) * self.block_bytes, np.uint8)
        state[:_LENGTH] = np.frombuffer(length.to_bytes(_LENGTH, "little"), np.uint8)
        for cache, saved in self._layers(len(blocks), state):
            if cancellable and self._cancelled.is_set():
                raise DecodeCancelledError("A state was not saved.")
            np.take(cache, blocks, axis=0, out=saved, mode="clip")  # "raise" copies twice
            if length % BLOCK:
                saved[-1, :, length % BLOCK :] = 0  # another sequence may have had that block
        return state.data

    def _layers(
        self, n_blocks: int, state: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        at = _LENGTH
        for cache in self._caches.values():
            end = at + n_blocks * cache[0].nbytes
            yield cache, state[at:end].view(cache.dtype).reshape(n_blocks, *cache.shape[1:])
            at = end

    def restore(self, seq_id: int, state: bytes | memoryview) -> None:
        """Fill a sequence with a state. Raises DecodeError if it is none of this model's, or there is no
        room: the sequence is empty then."""
        self.truncate(seq_id, 0)
        length = int.from_bytes(state[:_LENGTH], "little")
        n_blocks = -(-length // BLOCK)
        if len(state) != _LENGTH + n_blocks * self.block_bytes:
            raise DecodeError("The saved state cannot be used: it is of another size.")
        self._tables.extend({seq_id: length})
        blocks = self._tables.blocks(seq_id)
        for cache, saved in self._layers(n_blocks, np.frombuffer(state, np.uint8)):
            cache[blocks] = saved


def _zeros(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    cells: NDArray[Any] = room[start : start + n_bytes].view(dtype).reshape(shape)
    return cells


def _begins(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
