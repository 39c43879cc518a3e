"""Compiles a graph for passes over any rows of any sequences, with a KV cache in blocks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13 as op
from openvino._offline_transformations import paged_attention_transformation

from serve_app.base.errors import ConfigError, DecodeError
from serve_app.kernels.openvino.graph import FREQUENCIES, HIDDEN, GraphNotes

CacheType = Literal["f16", "bf16", "u8"]
"""The format of keys and values. With bf16, attention is computed with such numbers, too, which some
processors do twice as fast. With u8, each token's numbers of a head are bytes with a scale of their own.
These processors compute attention to them with bf16, too."""

SAMPLED, EMBEDDED = "sampled", "embedded"
"""Inputs: the rows whose logits, and whose vectors, are wanted."""
LOGITS, VECTORS = "logits", "vectors"
KEYS = "key_cache."
CACHES = (KEYS, "value_cache.")
"""The names of inputs that are one layer's cache begin so."""
_ATTENTION = "PagedAttentionExtension"
# Inputs of paged attention, by number. Source: OpenVINO, `op/paged_attention.hpp`.
_KEY_CACHE, _WINDOW = 3, 10
# Source: madvise(2), asm-generic/mman-common.h.
_DONTNEED = 4
_EVERY_S = 0.05


def computes_bf16() -> bool:
    """Whether the processor computes with such numbers."""
    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def check_cache_type(cache_type: CacheType) -> None:
    """Raises ConfigError on a processor without such numbers, where they would be turned to others and
    back. Quick: to be called before anything is converted."""
    if cache_type == "bf16" and not computes_bf16():
        raise ConfigError(
            "engine.cache_type_k and engine.cache_type_v: bf16 needs a processor that computes with such "
            "numbers (avx512_bf16 or amx_bf16), with engine.backend: openvino. Use f16 for both."
        )


def settings(threads: int, cache_type: CacheType = "f16") -> dict[str, Any]:
    """The properties that a model is compiled with. Threads stay where the caller's affinity has them: a
    replica's cores are leased."""
    # A scale for a channel of a whole block would change with every token that the block gets.
    by_token = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if cache_type == "u8" else {}
    return by_token | {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # bf16 is slower without AMX, and less exact
        "KV_CACHE_PRECISION": cache_type,
    }


def infer(request: openvino.InferRequest, inputs: Mapping[str, NDArray[Any]]) -> None:
    """Compute a pass over these inputs. Raises DecodeError."""
    for name, values in inputs.items():
        request.set_tensor(name, openvino.Tensor(values))
    try:
        request.infer()
    except RuntimeError as error:
        raise DecodeError(f"OpenVINO cannot compute this batch: {error}") from error


def read_graph(path: Path) -> openvino.Model:
    """The graph. Raises ConfigError."""
    try:
        return openvino.Core().read_model(path)
    except RuntimeError as error:
        raise ConfigError(f"OpenVINO's backend cannot read {path}: {error}.") from error


def compile_model(
    path: Path, model: openvino.Model, threads: int, cache_type: CacheType, n_ctx: int
) -> tuple[openvino.CompiledModel, dict[str, NDArray[np.float32]]]:
    """The model, or a part of it, with paged attention for contexts of `n_ctx` tokens. Its last product, if
    it has that, has the rows only that are sampled. And how far positions turn the keys of each cache of
    keys. Raises ConfigError."""
    try:
        notes = GraphNotes.of(model)
        constants = {one.get_friendly_name(): one for one in model.get_ops()}
        is_long = notes.long_frequencies and n_ctx > notes.n_ctx_train
        if is_long and FREQUENCIES in constants:
            short = constants[FREQUENCIES]
            longer = np.array(notes.long_frequencies, np.float32).reshape(short.data.shape)
            constants[FREQUENCIES] = op.constant(longer)
            short.output(0).replace(constants[FREQUENCIES].output(0))
        paged_attention_transformation(model)
        frequencies = {}
        for attention in _attentions(model):
            cache = attention.input_value(_KEY_CACHE).get_node().get_friendly_name()
            layer = notes.layers[int(cache.removeprefix(KEYS))]
            window = op.constant(np.int32(layer.window))
            attention.input(_WINDOW).replace_source_output(window.output(0))
            radians = np.zeros(1, np.float32)
            if layer.frequencies is not None:
                radians = np.array(constants[layer.frequencies].data, np.float32)
            frequencies[cache] = radians.reshape(-1)
        if any(LOGITS in port.get_names() for port in model.outputs):
            _choose_rows(model)
        if cache_type != "f16" and computes_bf16():
            _narrow_attention(model)
        # A thread whose core another program has for a moment leaves its work to the other ones.
        ways = settings(threads, cache_type) | {"TBB_PARTITIONER": "AUTO"}
        return openvino.Core().compile_model(model, "CPU", ways), frequencies
    except RuntimeError as error:
        raise ConfigError(f"OpenVINO cannot compile {path}: {error}") from error


def _attentions(model: openvino.Model) -> list[Any]:
    return [one for one in model.get_ops() if one.get_type_name() == _ATTENTION]


def _choose_rows(model: openvino.Model) -> None:
    (hidden,) = (
        output
        for node in model.get_ops()
        for output in node.outputs()
        if HIDDEN in output.get_names()
    )
    users = hidden.get_target_inputs()
    sampled, embedded = (op.parameter([-1], np.int64, name=name) for name in (SAMPLED, EMBEDDED))
    for name, rows in ((SAMPLED, sampled), (EMBEDDED, embedded)):
        rows.output(0).set_names({name})
    first = op.constant(np.int64(0))
    for user in users:
        user.replace_source_output(op.gather(hidden, sampled, first).output(0))
    vectors = op.result(op.gather(hidden, embedded, first))
    vectors.output(0).set_names({VECTORS})
    model.add_parameters([sampled, embedded])
    model.add_results([vectors])
    model.validate_nodes_and_infer_types()


def _narrow_attention(model: openvino.Model) -> None:
    """Have attention compute with bf16, and everything else as before: its queries, keys and values become
    such numbers, and what comes out becomes f32."""
    for attention in _attentions(model):
        for port in attention.inputs()[:3]:
            wide = port.get_source_output()
            port.replace_source_output(op.convert(wide, "bf16").output(0))
        attention.validate_and_infer_types()
        users = list(attention.output(0).get_target_inputs())
        wide = op.convert(attention.output(0), "f32").output(0)
        for user in users:
            user.replace_source_output(wide)
    model.validate_nodes_and_infer_types()


# -- memory that the system gets back -------------------------------------------------------------


def forget(path: Path) -> None:
    """Have the pages of a mapped file leave this process's memory. Those that are read again come back from
    the file. Nothing happens where the system does not tell what is mapped. Any thread.

    Only for files that are mapped to be read: what was written in a private mapping is lost.
    """
    with suppress(OSError):
        for begin, end in _spans(path.resolve()):
            give_back(begin, end)


def give_back(begin: int, end: int) -> None:
    """Have the whole pages between these addresses leave this process's memory. What was written there and
    is in no file is lost: zeros are read of it. Any thread."""
    begin, end = -(-begin // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(max(0, end - begin)), _DONTNEED)


@contextmanager
def forgetting(path: Path) -> Iterator[None]:
    """Inside the block, what is read of a mapped file stays in this process's memory for a moment only. For
    a large file of which every page is read about once. It must stay mapped for as long: where nothing is
    mapped any more, others' memory would be forgotten."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_EVERY_S):
            forget(path)

    thread = threading.Thread(target=run, name="forgetting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        forget(path)


def _spans(path: Path) -> list[tuple[int, int]]:
    """The addresses at which the file is mapped to be read only. Source: proc_pid_maps(5)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(maxsplit=5)
        if name == str(path) and rights.startswith("r--"):
            begin, end = (int(one, 16) for one in span.split("-"))
            found.append((begin, end))
    return found
