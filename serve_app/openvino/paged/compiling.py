"""Compiles a graph for passes over any rows of any sequences, with a KV cache in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from serve_app.errors import ConfigError
from serve_app.openvino.exported.forms import trusted
from serve_app.openvino.exported.graph import name_parts
from serve_app.openvino.graph import FREQUENCIES, HIDDEN

CacheType = Literal["f16", "bf16"]
"""The format of keys and values. With bf16, attention is computed with such numbers, too, which some
processors do twice as fast."""

SAMPLED, EMBEDDED = "sampled", "embedded"
"""Inputs: the rows whose logits, and whose vectors, are wanted."""
LOGITS, VECTORS = "logits", "vectors"
"""Outputs."""
KEYS = "key_cache."
CACHES = (KEYS, "value_cache.")
"""The names of inputs that are one layer's cache begin so."""
_ATTENTION = "PagedAttentionExtension"


def check_cache_type(cache_type: CacheType) -> None:
    """Raises ConfigError on a processor without such numbers, where they would be turned to others and
    back. Quick: to be called before anything is converted."""
    if cache_type == "f16":
        return
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ConfigError(
            "engine.cache_type_k and engine.cache_type_v: bf16 needs a processor that computes with such "
            "numbers (avx512_bf16 or amx_bf16), with engine.backend: openvino. Use f16 for both."
        )


def settings(threads: int, cache_type: CacheType = "f16") -> dict[str, Any]:
    """The properties that a model is compiled with. Threads stay where the caller's affinity has them: a
    replica's cores are leased."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # bf16 is slower without AMX, and less exact
        "KV_CACHE_PRECISION": cache_type,
    }


def read(path: Path, frequencies: NDArray[np.float32] | None, n_vocab: int) -> openvino.Model:
    """The graph, its parts named as `graph` names them. `frequencies` are the rotary embedding's, of a
    graph that was not built here. Raises ConfigError."""
    try:
        model = openvino.Core().read_model(path)
        if frequencies is not None:
            with trusted("its graph"):
                name_parts(model, frequencies, n_vocab)
    except (ConfigError, RuntimeError) as error:
        raise ConfigError(f"OpenVINO's backend cannot read {path}: {error}.") from error
    return model


def compiled(
    path: Path, model: openvino.Model, threads: int, cache_type: CacheType
) -> tuple[openvino.CompiledModel, NDArray[np.float32]]:
    """The model with paged attention, whose last product has the rows only that are sampled; and how far
    its positions turn. Raises ConfigError."""
    try:
        names = {one.get_friendly_name(): one for one in model.get_ops()}
        frequencies = np.array(names[FREQUENCIES].data, np.float32).reshape(-1)
        paged_attention_transformation(model)
        _choose_rows(model)
        if cache_type == "bf16":
            _narrow_attention(model)
        found = openvino.Core().compile_model(model, "CPU", settings(threads, cache_type))
        return found, frequencies
    except RuntimeError as error:
        raise ConfigError(f"OpenVINO cannot compile {path}: {error}") from error


def _choose_rows(model: openvino.Model) -> None:
    """Have logits of some rows only, and vectors of others."""
    (hidden,) = (
        output
        for node in model.get_ops()
        for output in node.outputs()
        if HIDDEN in output.get_names()
    )
    users = hidden.get_target_inputs()
    sampled, embedded = (
        opset13.parameter([-1], np.int64, name=name) for name in (SAMPLED, EMBEDDED)
    )
    for name, rows in ((SAMPLED, sampled), (EMBEDDED, embedded)):
        rows.output(0).set_names({name})
    first = opset13.constant(np.int64(0))
    for user in users:
        user.replace_source_output(opset13.gather(hidden, sampled, first).output(0))
    vectors = opset13.result(opset13.gather(hidden, embedded, first))
    vectors.output(0).set_names({VECTORS})
    model.add_parameters([sampled, embedded])
    model.add_results([vectors])
    model.validate_nodes_and_infer_types()


def _narrow_attention(model: openvino.Model) -> None:
    """Have attention compute with bf16, and everything else as before: its queries, keys and values become
    such numbers, and what comes out becomes f32."""
    for attention in [one for one in model.get_ops() if one.get_type_name() == _ATTENTION]:
        for port in attention.inputs()[:3]:
            wide = port.get_source_output()
            port.replace_source_output(opset13.convert(wide, "bf16").output(0))
        attention.validate_and_infer_types()
        users = list(attention.output(0).get_target_inputs())
        wide = opset13.convert(attention.output(0), "f32").output(0)
        for user in users:
            user.replace_source_output(wide)
    model.validate_nodes_and_infer_types()
