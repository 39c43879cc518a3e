"""The graph that OpenVINO's exporter wrote of a model: its parts get the names that `graph` gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13 as op

from serve_app.errors import ConfigError
from serve_app.openvino.graph import FREQUENCIES, HIDDEN

_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_LOGITS = "logits"
_RELATIVE, _ABSOLUTE = 2e-3, 1e-7
"""By so much exporters round frequencies, which they write as 16-bit floats."""

Node = Any
"""An operation of OpenVINO's, which has no types."""


def name_parts(model: openvino.Model, frequencies: NDArray[np.float32], n_vocab: int) -> None:
    """Name the vectors that logits are computed from, and the rotary frequencies. These are replaced by
    those given, of which the exporter's are the same or rounded. Raises ConfigError, with the reason as the
    rest of a sentence, for another graph than a causal model's with a state."""
    _check(model, n_vocab)
    _last_product(model).input_value(0).add_names({HIDDEN})
    rounded = _constant(model, frequencies)
    exact = op.constant(frequencies.reshape(rounded.get_output_shape(0)))
    exact.set_friendly_name(FREQUENCIES)
    for source in _as_floats(rounded):
        for user in source.get_target_inputs():
            user.replace_source_output(exact.output(0))


def _check(model: openvino.Model, n_vocab: int) -> None:
    names = {name for one in model.inputs for name in one.get_names()}
    if missing := [name for name in _INPUTS if name not in names]:
        raise ConfigError(f"its graph has no input {missing[0]}")
    if not model.get_variables():
        raise ConfigError("its graph has no state: it was exported without a KV cache")
    n_logits = model.output(_LOGITS).get_partial_shape()[2]
    if not n_logits.is_static or n_logits.get_length() != n_vocab:
        raise ConfigError(f"its graph has {n_logits} logits instead of {n_vocab}")


def _last_product(model: openvino.Model) -> Node:
    """The product of the last vectors with the matrix of logits."""
    node = model.output(_LOGITS).get_node().input_value(0).get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        raise ConfigError(f"its logits come from {node.get_type_name()}, not from a product")
    return node


def _constant(model: openvino.Model, frequencies: NDArray[np.float32]) -> Node:
    """The constant with these frequencies."""
    for node in model.get_ops():
        if (
            node.get_type_name() == "Constant"
            and node.get_element_type().is_real()
            and np.prod(node.get_output_shape(0)) == frequencies.size
            and np.allclose(np.ravel(node.data), frequencies, _RELATIVE, _ABSOLUTE)
        ):
            return node
    raise ConfigError("its rotary frequencies are not those of its config.json")


def _as_floats(constant: Node) -> list[Node]:
    """The constant's output, or those where it is converted to 32-bit floats."""
    users = [one.get_node() for one in constant.output(0).get_target_inputs()]
    converted = [one.output(0) for one in users if one.get_type_name() == "Convert"]
    return converted or [constant.output(0)]
