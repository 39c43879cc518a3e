"""Products of matrices by llama.cpp's kernels, one at a time: AMX against plain.

    python -m tests.amx.products TYPE

TYPE is a tensor's, by ggml's name. Prints a JSON object: for each shape of `shapes`, the greatest
difference in the product, relative to the root mean square of all of it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import llama_cpp.llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from serve_app.kernels.llama import library

ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100)
"""Of the left matrix, a prompt's tokens: parts of a tile, whole ones and several."""
COLUMNS = (32, 96)
DEPTHS = (256, 1024)
N_THREADS = 2
_MEMORY = 1 << 20
"""For what describes a few tensors and a graph, in bytes."""

Matrix = NDArray[np.float32]


class _Parameters(ctypes.Structure):
    """`struct ggml_init_params` of ggml.h."""

    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


_P = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_init": (_P, _Parameters),
    "ggml_free": (None, _P),
    "ggml_nbytes": (c_size_t, _P),
    "ggml_new_tensor_2d": (_P, _P, c_int, c_int64, c_int64),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_quantize_chunk": (c_size_t, c_int, _P, _P, c_int64, c_int64, c_int64, _P),
    "ggml_backend_cpu_init": (_P,),
    "ggml_backend_cpu_reg": (_P,),
    "ggml_backend_cpu_set_n_threads": (None, _P, c_int),
    "ggml_backend_cpu_buffer_type": (_P,),
    "ggml_backend_reg_dev_get": (_P, _P, c_size_t),
    "ggml_backend_reg_get_proc_address": (_P, _P, c_char_p),
    "ggml_backend_buft_name": (c_char_p, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_tensor_set": (None, _P, _P, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, _P, _P, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, _P, _P),
}
"""What each function returns and takes."""


class Ggml:
    """ggml's functions, as llama-cpp-python has loaded them."""

    def __init__(self) -> None:
        library.init()
        self._library = llama_cpp.llama_cpp._lib
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._processor = self.call("backend_cpu_init")
        self.call("backend_cpu_set_n_threads", self._processor, N_THREADS)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, f"ggml_{name}")(*arguments)

    def buffer_type(self, name: str) -> Any:
        """Where weights are kept for the kernels of this name. Raises LookupError if there are none."""
        registry = self.call("backend_cpu_reg")
        found = self.call(
            "backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts"
        )
        list_them = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(found)
        there = list_them(self.call("backend_reg_dev_get", registry, 0))
        for one in itertools.takewhile(bool, there):
            if self.call("backend_buft_name", one) == name.encode():
                return one
        raise LookupError(f"llama.cpp has no kernels of the name {name}")

    def multiply(self, kind: int, weights: Matrix, rows: Matrix, buffer_type: Any) -> Matrix:
        """`rows @ weights.T`, with weights of this type, kept there."""
        kept, worked = (self.call("init", _Parameters(_MEMORY, None, True)) for _ in range(2))
        left = self.call("new_tensor_2d", kept, kind, weights.shape[1], weights.shape[0])
        right = self.call("new_tensor_2d", worked, 0, rows.shape[1], rows.shape[0])
        product, graph = self.call("mul_mat", worked, left, right), self.call("new_graph", worked)
        self.call("build_forward_expand", graph, product)
        plain = self.call("backend_cpu_buffer_type")
        buffers = [
            self.call("backend_alloc_ctx_tensors_from_buft", *pair)
            for pair in ((kept, buffer_type), (worked, plain))
        ]
        self._set(left, self._quantised(kind, weights))
        self._set(right, rows)
        assert self.call("backend_graph_compute", self._processor, graph) == 0
        out = np.empty((len(rows), len(weights)), np.float32)
        self.call("backend_tensor_get", product, out.ctypes.data, 0, out.nbytes)
        for buffer in buffers:
            self.call("backend_buffer_free", buffer)
        for context in (kept, worked):
            self.call("free", context)
        return out

    def _quantised(self, kind: int, weights: Matrix) -> NDArray[np.uint8]:
        out = np.empty(weights.nbytes, np.uint8)
        pointers = (weights.ctypes.data, out.ctypes.data)
        n_bytes = self.call("quantize_chunk", kind, *pointers, 0, *weights.shape, None)
        return out[:n_bytes]

    def _set(self, tensor: Any, data: NDArray[Any]) -> None:
        self.call("backend_tensor_set", tensor, data.ctypes.data, 0, data.nbytes)


def shapes() -> Iterator[tuple[int, int, int]]:
    """Rows, columns and depth of products."""
    yield from itertools.product(ROWS, COLUMNS, DEPTHS)


def error(ggml: Ggml, kind: int, n_rows: int, n_columns: int, depth: int) -> float:
    """The difference between the two kinds of kernels."""
    rng = np.random.default_rng([n_rows, n_columns, depth])
    weights = rng.standard_normal((n_columns, depth), np.float32)
    rows = rng.standard_normal((n_rows, depth), np.float32)
    places = (ggml.call("backend_cpu_buffer_type"), ggml.buffer_type("AMX"))
    plain, amx = (ggml.multiply(kind, weights, rows, place).astype(float) for place in places)
    return float(abs(amx - plain).max() / np.sqrt((plain**2).mean()))


def main() -> None:
    """Print the errors of the argument's type."""
    ggml, kind = Ggml(), GGMLQuantizationType[sys.argv[1]].value
    print(json.dumps({" x ".join(map(str, one)): error(ggml, kind, *one) for one in shapes()}))


if __name__ == "__main__":
    main()
