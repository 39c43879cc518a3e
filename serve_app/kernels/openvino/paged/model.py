"""The layers of a model, or of a part of it, compiled by OpenVINO, with their KV cache in blocks.

Several contexts may share a cache, each with blocks of its own. Operations take arrays by name and return
those that the part behind this one takes. So the parts of a model are computed one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import openvino
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError, DecodeCancelledError, DecodeError
from serve_app.base.sharing.pacing import pace
from serve_app.kernels.openvino.gguf_model import EmbeddingRows
from serve_app.kernels.openvino.graph import EMBEDS, HIDDEN, TOKENS
from serve_app.kernels.openvino.paged import compiling, shifts
from serve_app.kernels.openvino.paged.blocks import BLOCK
from serve_app.kernels.openvino.parts import ModelPart

_ALIGNMENT = 64
Operation = Literal[
    "describe", "warm_up", "compute", "fill", "release", "shift", "save", "restore", "read"
]
Values = dict[str, NDArray[Any]]
HIGHEST = "n_highest"
"""How many of the highest logits are wanted of each row, for layers elsewhere; 0 for all. Fewer need not be
left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedOptions:
    """The sizes of a paged context, and how it computes."""

    n_sequences: int
    n_ctx_slot: int
    n_blocks: int
    threads: int
    n_texts: int = 0
    n_text_blocks: int = 0
    cache_type: compiling.CacheType = "f16"
    context: int = 0
    """The number of this context among those that share the cache."""
    n_contexts: int = 1
    keeps_states: bool = False
    """Whether each part of the model keeps its part of a saved state, instead of sending it."""


class Layers(Protocol):
    """The layers of a whole model, wherever they are computed. One thread, but for `cancel`."""

    def run(self, operation: Operation, values: Values) -> Values:
        """Carry out an operation of `PagedModel` in all parts of the model. Raises as that does."""

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have every `run` end early with DecodeCancelledError, or compute again with
        False."""

    def close(self) -> None:
        """Free what is held. Idempotent."""


class LayerChain(Layers, Protocol):
    """The layers of a model whose parts several processes compute; this one computes `part`."""

    part: ModelPart

    def open(self, make_model: Callable[[], PagedModel]) -> None:
        """Make this process's part, and connect it with the others. Raises ConfigError, and
        EngineFailedError."""


class PagedModel:
    """Compiled layers and their cache. Only one thread, always the same, may use it; any may call `cancel`.
    Raises ConfigError if the model cannot be compiled."""

    def __init__(
        self,
        path: Path,
        options: PagedOptions,
        embeddings: EmbeddingRows | None = None,
        few: tuple[Path, int] | None = None,
    ) -> None:
        """`embeddings` are for the first of several parts. `few` is the model with other weights, for
        passes that want logits and have fewer rows than that."""
        self._embeddings = embeddings
        self.weights_bytes = 0
        executable, self.frequencies = self._compile(path, options)
        request = executable.create_infer_request()
        self._requests: list[tuple[openvino.InferRequest, Path]] = [(request, path)]
        """Each has the graph of its weights; a second one is for few rows."""
        n_blocks = options.n_contexts * (options.n_blocks + options.n_text_blocks)
        try:
            self.caches = {
                one.any_name: self._cache(request, one, n_blocks)
                for one in executable.inputs
                if one.any_name.startswith(compiling.CACHES)
            }
        except MemoryError:
            raise ConfigError(
                f"There is no memory for a KV cache of {n_blocks * BLOCK} tokens: lower engine.n_slots or "
                "engine.n_ctx_slot."
            ) from None
        self._many_from = 0
        if few is not None:
            other, self._many_from = few
            of_few = self._compile(other, options)[0].create_infer_request()
            for name in self.caches:
                of_few.set_tensor(name, request.get_tensor(name))
            self._requests.append((of_few, other))
        self._inputs = {one.any_name for one in executable.inputs}
        self._is_last = compiling.SAMPLED in self._inputs
        self._kept: dict[int, NDArray[np.uint8]] = {}
        """The parts of saved states that are kept here, by number."""
        self._cancelled = threading.Event()

    def _compile(
        self, path: Path, options: PagedOptions
    ) -> tuple[openvino.CompiledModel, dict[str, NDArray[np.float32]]]:
        weights = path.with_suffix(".bin")
        self.weights_bytes += weights.stat().st_size
        graph = compiling.read_graph(path)  # which has the file mapped
        with compiling.forgetting(weights), pace():
            return compiling.compile_model(
                path, graph, options.threads, options.cache_type, options.n_ctx_slot
            )

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
    def _block_bytes(self) -> int:
        return sum(one[0].nbytes for one in self.caches.values())

    def run(self, operation: Operation, values: Values) -> Values:
        """Carry out an operation: see the methods of these names. Raises DecodeError."""
        method: Any = getattr(self, f"_{operation}")
        result: Values = method(values)
        return result

    def _describe(self, values: Values) -> Values:
        """Add the bytes of a block and of all weights, and the numbers of each layer's keys: their format,
        and how far positions turn them."""
        turns = b"".join(
            self.caches[name].dtype.str.encode() + radians.tobytes()
            for name, radians in self.frequencies.items()
        )
        described: Values = {
            "block_bytes": np.array([self._block_bytes], np.int64),
            "weight_bytes": np.array([self.weights_bytes], np.int64),
            "turns": np.frombuffer(turns, np.uint8),
        }
        empty = np.empty(0, np.uint8)
        return {
            name: np.concatenate([values.get(name, empty).astype(more.dtype), more])
            for name, more in described.items()
        }

    def _warm_up(self, values: Values) -> Values:
        """Compute the first pass. For it, the kernels put the weights into an order of their own, so the
        file's pages are not needed any more."""
        for request, path in reversed(self._requests):
            with compiling.forgetting(path.with_suffix(".bin")), pace():
                computed = self._infer(request, values)
        return computed

    def _compute(self, values: Values) -> Values:
        """Compute a pass: of tokens or hidden states, to hidden states, logits or vectors. First, blocks
        are copied that the context does not own any more."""
        for source, target in values.get("copies", ()):
            for cache in self.caches.values():
                cache[target] = cache[source]
        self._refuse_cancelled("The pass was cancelled.")
        first, *of_few = self._requests
        if of_few and values[compiling.SAMPLED].size and len(values[TOKENS]) < self._many_from:
            (first,) = of_few
        return self._infer(first[0], values)

    def _infer(self, request: openvino.InferRequest, values: Values) -> Values:
        inputs = {name: array for name, array in values.items() if name in self._inputs}
        if self._embeddings is not None:
            inputs[EMBEDS] = self._embeddings.of(values[TOKENS])
        try:
            compiling.infer(request, inputs)
        except DecodeError:
            self._refuse_cancelled("The pass was cancelled.")
            raise
        output = HIDDEN
        if self._is_last:
            output = compiling.LOGITS if values[compiling.SAMPLED].size else compiling.VECTORS
        computed: NDArray[np.float32] = request.get_tensor(output).data
        computed = computed.reshape(-1, computed.shape[-1])
        if self._is_last:
            return {output: computed}
        rest = {name: array for name, array in values.items() if name != TOKENS}
        return rest | {EMBEDS: computed}

    def _refuse_cancelled(self, reason: str) -> None:
        if self._cancelled.is_set():
            raise DecodeCancelledError(reason)

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have every pass end early, or compute again with False."""
        if cancelled:
            self._cancelled.set()
            for request, _ in self._requests:
                request.cancel()
        else:
            self._cancelled.clear()

    def close(self) -> None:
        """Free the compiled model and the cache. Idempotent."""
        self._requests, self.caches, self._kept = [], {}, {}

    def _fill(self, values: Values) -> Values:
        """Write zeros: memory that nobody wrote is a single page, and ones would make rows more alike."""
        for cache in self.caches.values():
            cache[values["blocks"]] = 0
        return values

    def _release(self, values: Values) -> Values:
        """Give the system the memory of a range of blocks, which hold nothing any more."""
        first, behind = values["range"].tolist()
        for cache in self.caches.values():
            begin, block_bytes = cache.ctypes.data, cache[0].nbytes
            compiling.give_back(begin + first * block_bytes, begin + behind * block_bytes)
        return values

    def _shift(self, values: Values) -> Values:
        """Move the cells at `places` of the `old` blocks to the `new` ones, each `n_before` places
        earlier."""
        old, new, places, n_before = (values[name] for name in ("old", "new", "places", "n_before"))
        for name, cache in self.caches.items():
            cells = shifts.cells_of(cache[old])[places]
            if name.startswith(compiling.KEYS):
                cells = shifts.turn_back(cells, n_before, self.frequencies[name])
            cache[new] = shifts.blocks_of(cells)
        return values

    def _save(self, values: Values) -> Values:
        """Add what these blocks hold, layer by layer, or keep it under a `number`, and forget what was kept
        under those that are `dropped`. The last block has `n_last` tokens, and what is behind these is
        another sequence's: zeros are saved for it."""
        blocks, n_last = values["blocks"], int(values["n_last"])
        before = values.get("state", np.empty(0, np.uint8))
        state = np.empty(len(before) + len(blocks) * self._block_bytes, np.uint8)
        state[: len(before)] = before
        for cache, saved in self._layers(len(blocks), state[len(before) :]):
            if "cancellable" in values:
                self._refuse_cancelled("A state was not saved.")
            np.take(cache, blocks, axis=0, out=saved, mode="clip")  # "raise" copies twice
            if len(blocks):
                saved[-1, :, n_last:] = 0
        if "number" not in values:
            return values | {"state": state}
        for number in values["dropped"].tolist():
            self._kept.pop(number, None)
        self._kept[int(values["number"])] = state
        return values

    def _restore(self, values: Values) -> Values:
        """Fill these blocks with what was kept under a `number`, or with the beginning of a state. The rest
        is for the parts behind this one."""
        blocks, is_kept = values["blocks"], "number" in values
        state = self._part(values) if is_kept else values["state"]
        n_bytes = len(blocks) * self._block_bytes
        for cache, saved in self._layers(len(blocks), state[:n_bytes]):
            cache[blocks] = saved
        return values if is_kept else values | {"state": state[n_bytes:]}

    def _read(self, values: Values) -> Values:
        """Add what was kept under a `number`."""
        return values | {"state": np.concatenate([values["state"], self._part(values)])}

    def _part(self, values: Values) -> NDArray[np.uint8]:
        part = self._kept.get(int(values["number"]))
        if part is None:
            raise DecodeError("The saved state cannot be used: it is not kept here.")
        return part

    def _layers(
        self, n_blocks: int, state: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        at = 0
        for cache in self.caches.values():
            end = at + n_blocks * cache[0].nbytes
            yield cache, state[at:end].view(cache.dtype).reshape(n_blocks, *cache.shape[1:])
            at = end


def _zeros(shape: list[int], dtype: Any) -> NDArray[Any]:
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    cells: NDArray[Any] = room[start : start + n_bytes].view(dtype).reshape(shape)
    return cells
