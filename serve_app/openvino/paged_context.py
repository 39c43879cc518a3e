"""A model compiled by OpenVINO with paged attention: any rows of any sequences in one pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from serve_app.errors import ConfigError, DecodeError, PassLeftError
from serve_app.llama.model import Model
from serve_app.llama.sampling.candidates import Candidates
from serve_app.openvino.blocks import BLOCK, BlockCopy, BlockTables
from serve_app.openvino.graph import HIDDEN

Row = tuple[int, int, int, bool]
"""(token, position, sequence, wants logits); see `serve_app.engine.backends.base`."""

_SAMPLED = "sampled"
_ALIGNMENT = 64
_CACHES = ("key_cache.", "value_cache.")


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows as the compiled model takes them."""

    inputs: dict[str, NDArray[Any]]
    outputs: dict[int, int]
    """Which row of the logits belongs to which row of the batch."""


class PagedContext:
    """Decodes batches of rows. Only one thread, always the same, may use it; any may call `leave`.

    Sequences share blocks of `BLOCK` tokens where they are copies of each other. Raises ConfigError if the
    model cannot be compiled.
    """

    def __init__(
        self,
        path: Path,
        model: Model,
        *,
        n_sequences: int,
        n_ctx_slot: int,
        n_blocks: int,
        threads: int,
    ) -> None:
        """`model` has the vocabulary; its weights are not used."""
        self.model = model
        self.n_ctx_slot = n_ctx_slot
        compiled = _compiled(path, threads)
        self.n_parameter_bytes = path.with_suffix(".bin").stat().st_size
        self._request: openvino.InferRequest | None = compiled.create_infer_request()
        try:
            self._caches = [
                self._cache(self._request, one, n_blocks)
                for one in compiled.inputs
                if one.any_name.startswith(_CACHES)
            ]
        except MemoryError:
            raise ConfigError(
                f"There is no memory for a KV cache of {n_blocks * BLOCK} tokens: lower engine.n_slots or "
                "engine.n_ctx_slot."
            ) from None
        self._tables = BlockTables(n_sequences, n_blocks)
        self._outputs: dict[int, int] = {}
        self._logits: NDArray[np.float32] = np.empty((0, model.n_vocab), np.float32)
        self._leaving = threading.Event()

    @staticmethod
    def _cache(request: openvino.InferRequest, port: Any, n_blocks: int) -> NDArray[Any]:
        """The memory of one layer's keys or values, which the compiled model writes."""
        shape = [one.get_length() if one.is_static else 0 for one in port.partial_shape]
        shape[0] = n_blocks
        if len(shape) != 4 or shape[2] not in (0, BLOCK):
            raise ConfigError(f"OpenVINO's cache has an unknown layout: {port.partial_shape}.")
        shape[2] = BLOCK
        cells = _zeros(shape, port.element_type.to_dtype())
        request.set_tensor(port.any_name, openvino.Tensor(cells, shared_memory=True))
        return cells

    @property
    def cache_bytes(self) -> int:
        """Of all blocks."""
        return sum(one.nbytes for one in self._caches)

    @property
    def n_tokens(self) -> int:
        """That all blocks have room for."""
        return len(self._caches[0]) * BLOCK

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return sum(one[0].nbytes for one in self._caches)

    def decode(self, rows: Sequence[Row]) -> None:
        """One forward pass; blocks for its length, without the GIL. Raises CacheFullError, and changes
        nothing, if there are no blocks for them; PassLeftError after `leave(True)`, and another DecodeError
        if they cannot be computed: the cache is then as it was."""
        by_sequence: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_sequence.setdefault(row[2], []).append(i)
        before = {one: self._tables.length(one) for one in by_sequence}
        for one, indices in by_sequence.items():
            positions = [rows[i][1] for i in indices]
            if positions != list(range(before[one], before[one] + len(indices))):
                raise DecodeError("Rows must continue their sequence.")
        self._copy(self._tables.extend({one: len(found) for one, found in by_sequence.items()}))
        try:
            self._run(self._pass(rows, by_sequence, before))
        except BaseException:
            for one, length in before.items():
                self._tables.truncate(one, length)
            raise

    def _pass(
        self,
        rows: Sequence[Row],
        by_sequence: dict[int, list[int]],
        before: dict[int, int],
    ) -> Pass:
        order = [i for indices in by_sequence.values() for i in indices]
        wanted = [at for at, i in enumerate(order) if rows[i][3]] or [len(order) - 1]
        tables = [self._tables.blocks(one) for one in by_sequence]
        longest = max(self._tables.length(one) for one in by_sequence)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array([rows[i][0] for i in order], np.int64),
            "position_ids": np.array([rows[i][1] for i in order], np.int64),
            "past_lens": np.array(list(before.values()), np.int32),
            "subsequence_begins": _begins([len(found) for found in by_sequence.values()]),
            "block_indices": np.array([block for table in tables for block in table], np.int32),
            "block_indices_begins": _begins([len(table) for table in tables]),
            "max_context_len": np.array(longest, np.int32),
            _SAMPLED: np.array(wanted, np.int64),
        }
        return Pass(inputs, {order[at]: n for n, at in enumerate(wanted)})

    def _run(self, made: Pass) -> None:
        if self._leaving.is_set():
            raise PassLeftError("The pass was left.")
        request = self._request
        assert request is not None
        for name, values in made.inputs.items():
            request.set_tensor(name, openvino.Tensor(values))
        try:
            request.infer()
        except RuntimeError as error:
            if self._leaving.is_set():
                raise PassLeftError("The pass was left.") from None
            raise DecodeError(f"OpenVINO cannot compute this batch: {error}") from error
        found = request.get_output_tensor(0).data
        self._logits = found.reshape(-1, found.shape[-1])
        self._outputs = made.outputs

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for cache in self._caches:
                cache[copy.target] = cache[copy.source]

    def leave(self, leaving: bool) -> None:
        """Any thread: have the `decode` that runs, and those to come, end early; or, with False, have them
        compute again."""
        if leaving:
            self._leaving.set()
            if (request := self._request) is not None:
                request.cancel()
        else:
            self._leaving.clear()

    def close(self) -> None:
        """Free the compiled model and the cache. Idempotent."""
        self._request = None
        self._caches = []

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last decoded batch that asked for them, by token id: a view, good
        until the next `decode`."""
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
        """Give an empty sequence so many tokens, without computing them: which ones does not matter to a
        measurement of time. They are written, as all of the memory that nobody wrote is a single page.
        Raises CacheFullError."""
        self._tables.extend({seq_id: n_tokens})
        blocks = self._tables.blocks(seq_id)
        for cache in self._caches:
            cache[blocks] = 1

    def save(self, seq_id: int) -> bytes:
        """The sequence's tokens as a state: its length and its blocks, layer by layer."""
        blocks, length = self._tables.blocks(seq_id), self._tables.length(seq_id)
        parts = [length.to_bytes(8, "little")]
        for cache in self._caches:
            saved = cache[blocks]
            if length % BLOCK:
                saved[-1, :, length % BLOCK :] = 0  # another sequence may have had that block
            parts.append(saved.tobytes())
        return b"".join(parts)

    def restore(self, seq_id: int, state: bytes | memoryview) -> None:
        """Fill a sequence with a state. Raises DecodeError if it is none of this model's, or there is no
        room: the sequence is empty then."""
        self.truncate(seq_id, 0)
        length = int.from_bytes(state[:8], "little")
        n_blocks = -(-length // BLOCK)
        if len(state) != 8 + n_blocks * self.block_bytes:
            raise DecodeError("The saved state cannot be used: it is of another size.")
        self._tables.extend({seq_id: length})
        blocks, at = self._tables.blocks(seq_id), 8
        for cache in self._caches:
            size = n_blocks * cache[0].nbytes
            saved = np.frombuffer(state[at : at + size], cache.dtype)
            cache[blocks] = saved.reshape(n_blocks, *cache.shape[1:])
            at += size


def _zeros(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Memory that the system gives when it is first used, aligned as vectors want it."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    cells: NDArray[Any] = room[start : start + n_bytes].view(dtype).reshape(shape)
    return cells


def _begins(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def settings(threads: int) -> dict[str, Any]:
    """The properties that a model is compiled with. Threads stay where the caller's affinity has them: a
    replica's cores are leased."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # bf16 is slower without AMX, and less exact
        "KV_CACHE_PRECISION": "f16",
    }


def _compiled(path: Path, threads: int) -> openvino.CompiledModel:
    """The model with paged attention, whose last product has the rows only that are sampled."""
    core = openvino.Core()
    try:
        model = core.read_model(path)
        paged_attention_transformation(model)
        _gather_sampled(model)
        return core.compile_model(model, "CPU", settings(threads))
    except RuntimeError as error:
        raise ConfigError(f"OpenVINO cannot compile {path}: {error}") from error


def _gather_sampled(model: openvino.Model) -> None:
    (hidden,) = (
        one for node in model.get_ops() for one in node.outputs() if HIDDEN in one.get_names()
    )
    users = hidden.get_target_inputs()
    wanted = opset13.parameter([-1], np.int64, name=_SAMPLED)
    wanted.output(0).set_names({_SAMPLED})
    gathered = opset13.gather(hidden, wanted, opset13.constant(np.int64(0)))
    for user in users:
        user.replace_source_output(gathered.output(0))
    model.add_parameters([wanted])
    model.validate_nodes_and_infer_types()
