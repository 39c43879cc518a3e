"""Weights as their file has them, beside the same weights that llama.cpp repacked when it loaded them.

Repacked weights are for kernels of few rows. llama.cpp also has tiled kernels for many rows of K- and
IQ-quants, which skip weights that were repacked. So where memory has room for both, each batch is
computed over the weights that suit its rows. The tensors of the loaded model point to the repacked copy
or into the mapped file. Graphs, KV cache and everything cached stay as they are.

Sources: llama.cpp, `ggml_tensor` in ggml.h and `ggml_tiled_supported` in ggml-cpu/tiled/tiled.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import llama_cpp

from serve_app.base.errors import ConfigError
from serve_app.kernels.gguf_reader import GgufReader
from serve_app.kernels.llama import library

if TYPE_CHECKING:
    from serve_app.kernels.llama.model import Model

_USAGE_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
# The head of an object in a ggml_context, before its tensor.
_OBJECT_BYTES = 32


class GgmlTensor(ctypes.Structure):
    """llama.cpp's `ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


class _Place(NamedTuple):
    """The data of a tensor, as `ggml_tensor` names it."""

    buffer: int
    data: int
    extra: int | None


class StoredWeights:
    """The repacked tensors of a model, and where the file has their weights. Only the thread that computes
    may call, and the model must not be used after the object is gone. Raises ConfigError where llama.cpp's
    tensors are not as they are expected to be, or `gguf` cannot read the file."""

    def __init__(self, model: Model) -> None:
        if library.function("ggml_tensor_overhead", ctypes.c_size_t)() != (
            _OBJECT_BYTES + ctypes.sizeof(GgmlTensor)
        ):
            raise ConfigError(
                "This llama.cpp has tensors of another kind: weights have one layout."
            )
        readers = [GgufReader(path) for path in model.files]
        self._mappings = [reader.data for reader in readers]
        self._as_stored = False
        places = {name: place for reader in readers for name, place in _places(reader)}
        sized = library.function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        names = {(t.name, sized(ctypes.addressof(t))): t for t in _repacked_tensors(model)}
        self._tensors = [
            (tensor, _Place(tensor.buffer, tensor.data, tensor.extra), places[name])
            for name, tensor in names.items()
            if name in places
        ]
        self.n_bytes = sum(n_bytes for _, n_bytes in names.keys() & places)
        """Bytes of the mapped file that batches read."""

    def use(self, as_stored: bool) -> None:
        """Have all of the model's contexts compute over the weights in the file, or the repacked ones."""
        if as_stored != self._as_stored:
            for tensor, *places in self._tensors:
                tensor.buffer, tensor.data, tensor.extra = places[as_stored]
            self._as_stored = as_stored


def _places(reader: GgufReader) -> Iterator[tuple[tuple[bytes, int], _Place]]:
    """The names and bytes of a mapped file's tensors, and their places."""
    of_memory = library.function(
        "ggml_backend_cpu_buffer_from_ptr", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    )
    buffer = of_memory(reader.data.ctypes.data, len(reader.data))
    library.function("ggml_backend_buffer_set_usage", None, ctypes.c_void_p, ctypes.c_int)(
        buffer, _USAGE_WEIGHTS
    )
    for tensor in reader.tensors:
        place = _Place(buffer, tensor.data.ctypes.data, None)
        yield (tensor.name.encode(), tensor.n_bytes), place


def _repacked_tensors(model: Model) -> list[GgmlTensor]:
    """The tensors that llama.cpp repacked: the graph of an aborted pass over one row shows them."""
    repacked: dict[int, GgmlTensor] = {}

    def look(node: int, _ask: bool, _user_data: object) -> bool:
        address = GgmlTensor.from_address(node).src[0]
        if address and GgmlTensor.from_address(address).extra:
            repacked[address] = GgmlTensor.from_address(address)
        return False

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = params.n_seq_max = 1
    params.n_threads = 1  # a larger team of threads would stay
    params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(look)
    params.abort_callback = llama_cpp.ggml_abort_callback(lambda _user_data: True)
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    if not context:
        raise ConfigError(f"llama.cpp cannot make a context of one token for {model.path.name}.")
    token = (llama_cpp.llama_token * 1)(0)
    llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1))
    llama_cpp.llama_free(context)
    return list(repacked.values())
