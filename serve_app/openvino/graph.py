"""Builds OpenVINO's graph of a GGUF model: Llama's architecture, and those that differ little from it.

The graph is the one that OpenVINO's own tools write for such models, so that its passes know it: keys and
values are state, which paged attention replaces, and the rotary embedding and the norms are written out.
`ARCHITECTURES` says how they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13 as op

from serve_app.errors import ConfigError
from serve_app.openvino.gguf_model import ARCHITECTURES, GgufModel, Tensor
from serve_app.openvino.weights import GROUP, Quantised, floats, is_quantised, quantised

HIDDEN = "hidden_states"
FREQUENCIES = "rotary_frequencies"

Node = Any


def build(files: Sequence[Path], tell: Callable[[float], None]) -> openvino.Model:
    """The graph of the model in these files; `tell` is told now and then which part of it is there. Raises
    ConfigError for a model that it does not know, with the reason as the rest of a sentence."""
    model = GgufModel(files)
    if model.architecture not in ARCHITECTURES:
        raise ConfigError(f"the architecture {model.architecture} is not known")
    graph = _Graph(model, tell).build()
    if model.left:
        more = f" and {len(model.left) - 1} more" if len(model.left) > 1 else ""
        raise ConfigError(f"its tensor {model.left[0]}{more} would not be used")
    return graph


class _Graph:
    """The graph while it is built."""

    def __init__(self, model: GgufModel, tell: Callable[[float], None]) -> None:
        self._model, self._tell = model, tell
        self._kind = ARCHITECTURES[model.architecture]
        self._n_head = model.count("attention.head_count")
        self._n_head_kv = model.count("attention.head_count_kv", self._n_head)
        self._head = model.head_size
        self._rotary = model.rotary
        self._epsilon = float(model.value("attention.layer_norm_rms_epsilon"))
        self._inputs = {
            "input_ids": op.parameter([-1, -1], np.int64, name="input_ids"),
            "attention_mask": op.parameter([-1, -1], np.int64, name="attention_mask"),
            "position_ids": op.parameter([-1, -1], np.int64, name="position_ids"),
            "beam_idx": op.parameter([-1], np.int32, name="beam_idx"),
        }
        for name, one in self._inputs.items():
            one.output(0).set_names({name})
        self._sinks: list[Node] = []
        shape = op.shape_of(self._inputs["input_ids"])
        self._n_texts = op.gather(shape, _ints(0), _int(0))

    def build(self) -> openvino.Model:
        model = self._model
        embeddings = model.take("token_embd.weight")
        table = _rows(embeddings)
        ids = op.convert(self._inputs["input_ids"], np.int32)
        hidden = op.gather(table, ids, op.constant(np.int32(0)))
        self._cos, self._sin = self._turns()
        for layer in range(model.count("block_count")):
            hidden = self._layer(f"blk.{layer}.", layer, hidden)
            self._tell(model.part_taken)
        hidden = self._norm("output_norm", hidden)
        hidden.output(0).set_names({HIDDEN})
        if model.has("output.weight"):
            logits = self._product("output", hidden)
        else:
            logits = _times(hidden, embeddings, None)
        result = op.result(logits)
        result.output(0).set_names({"logits"})
        return openvino.Model([result], self._sinks, list(self._inputs.values()), "model")

    def _turns(self) -> tuple[Node, Node]:
        name = "rope_freqs.weight"
        factors = self._model.vector(name) if self._model.has(name) else None
        frequencies = op.constant(self._rotary.frequencies(factors).reshape(1, -1, 1))
        frequencies.set_friendly_name(FREQUENCIES)
        shape = op.concat([self._n_texts, _ints(1), _ints(1)], 0)
        positions = op.convert(op.unsqueeze(self._inputs["position_ids"], _int(1)), np.float32)
        spread = op.broadcast(frequencies, shape, broadcast_spec="BIDIRECTIONAL")
        angles = op.transpose(
            op.matmul(spread, positions, False, False), op.constant(np.array([0, 2, 1], np.int32))
        )
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), _int(1)), op.unsqueeze(op.sin(both), _int(1))

    def _layer(self, block: str, layer: int, hidden: Node) -> Node:
        normed = self._norm(f"{block}attn_norm", hidden)
        attended = self._attention(block, layer, normed)
        hidden = op.add(hidden, self._product(f"{block}attn_output", attended))
        normed = self._norm(f"{block}ffn_norm", hidden)
        gate = op.swish(self._product(f"{block}ffn_gate", normed))
        inner = op.multiply(gate, self._product(f"{block}ffn_up", normed))
        return op.add(hidden, self._product(f"{block}ffn_down", inner))

    def _attention(self, block: str, layer: int, hidden: Node) -> Node:
        n, n_kv, head = self._n_head, self._n_head_kv, self._head
        # Neighbours that turn together become halves of a head that do.
        interleaved = np.arange(head).reshape(-1, 2).T.reshape(-1)
        order = interleaved if self._kind.interleaved else None
        query = self._heads(f"{block}attn_q", self._product(f"{block}attn_q", hidden, order), n)
        key = self._heads(f"{block}attn_k", self._product(f"{block}attn_k", hidden, order), n_kv)
        value = self._heads(f"{block}attn_v", self._product(f"{block}attn_v", hidden), n_kv)
        query, key = self._turned(query), self._turned(key)
        keys = self._kept(f"past_key_values.{layer}.key", f"present.{layer}.key", key)
        values = self._kept(f"past_key_values.{layer}.value", f"present.{layer}.value", value)
        if n != n_kv:
            keys, values = self._repeated(keys), self._repeated(values)
        scale = op.constant(np.float32(self._rotary.attention_scale))
        mask = op.constant(np.zeros((1, 1, 1, 1), np.float32))  # paged attention has its own
        found = op.scaled_dot_product_attention(query, keys, values, mask, scale, False)
        found = op.transpose(found, op.constant(np.array([0, 2, 1, 3], np.int32)))
        return op.reshape(found, _ints(0, 0, n * head), True)

    def _heads(self, name: str, flat: Node, n_heads: int) -> Node:
        heads = op.reshape(flat, _ints(0, 0, n_heads, self._head), True)
        if self._model.has(f"{name}_norm.weight"):
            heads = self._norm(f"{name}_norm", heads)
        return op.transpose(heads, op.constant(np.array([0, 2, 1, 3], np.int32)))

    def _turned(self, heads: Node) -> Node:
        half, end, step, axis = _ints(self._head // 2), _ints(2**63 - 1), _ints(1), _ints(3)
        second = op.slice(heads, half, end, step, axis)
        negative = op.multiply(second, op.constant(np.float32(-1)))
        first = op.slice(heads, _ints(0), half, step, axis)
        across = op.concat([negative, first], -1)
        return op.add(op.multiply(heads, self._cos), op.multiply(across, self._sin))

    def _kept(self, past: str, present: str, new: Node) -> Node:
        n_kv, head = self._n_head_kv, self._head
        shape = op.concat([self._n_texts, _ints(n_kv), _ints(0), _ints(head)], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        name = past + present
        cached = op.read_value(empty, name, np.float32, openvino.PartialShape([-1, n_kv, -1, head]))
        chosen = op.gather(cached, self._inputs["beam_idx"], _int(0))
        rows = op.concat([chosen, new], 2)
        self._sinks.append(op.assign(rows, name))
        return rows

    def _repeated(self, heads: Node) -> Node:
        n, n_kv, head = self._n_head, self._n_head_kv, self._head
        shape = op.shape_of(heads)
        texts, length = (op.gather(shape, _ints(at), _int(0)) for at in (0, 2))
        wanted = op.concat([texts, _ints(n_kv), _ints(n // n_kv), length, _ints(head)], 0)
        spread = op.broadcast(op.unsqueeze(heads, _int(2)), wanted, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(spread, _ints(0, n, -1, head), True)

    def _norm(self, name: str, values: Node) -> Node:
        square = op.power(values, op.constant(np.float32(2)))
        mean = op.reduce_mean(square, op.constant(np.array([-1], np.int32)), True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(self._epsilon))))
        normed = op.multiply(values, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(normed, op.constant(self._model.vector(f"{name}.weight")))

    def _product(self, name: str, values: Node, order: NDArray[np.intp] | None = None) -> Node:
        """Times the matrix of that name, with its bias if it has one; `order` is that of a head's rows."""
        tensor = self._model.take(f"{name}.weight")
        rows = None
        if order is not None:
            heads = np.arange(0, len(tensor.data), self._head)
            rows = (heads[:, None] + order).reshape(-1)
        product = _times(values, tensor, rows)
        if self._model.has(f"{name}.bias"):
            bias = self._model.vector(f"{name}.bias")
            product = op.add(product, op.constant(bias if rows is None else bias[rows]))
        return product


def _ints(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _int(value: int) -> Node:
    return op.constant(np.int64(value))


def _times(values: Node, tensor: Tensor, rows: NDArray[np.intp] | None) -> Node:
    """The product with a matrix, whose rows may have another order."""
    data = tensor.data if rows is None else tensor.data[rows]
    if not is_quantised(tensor.kind):
        return op.matmul(values, _plain(floats(data, tensor.kind)), False, True)
    matrix = quantised(data, tensor.kind)
    product = op.matmul(values, _whole(matrix), False, True)
    if matrix.offsets is None:
        return product
    sums = op.reduce_sum(op.reshape(values, _ints(0, 0, -1, GROUP), True), _ints(3), False)
    return op.add(product, op.matmul(sums, _rest(matrix.offsets), False, True))


def _rows(tensor: Tensor) -> Node:
    """A matrix from which single rows are taken: offsets need not be whole there."""
    if not is_quantised(tensor.kind):
        return _plain(floats(tensor.data, tensor.kind))
    matrix = quantised(tensor.data, tensor.kind)
    if matrix.offsets is None:
        return _whole(matrix)
    scales = np.where(matrix.scales == 0, 1, matrix.scales)
    zeros = (0 if matrix.zeros is None else matrix.zeros) - matrix.offsets / scales
    return _whole(matrix, op.constant(zeros[..., None].astype(np.float32)))


def _plain(weights: NDArray[Any]) -> Node:
    return op.convert(op.constant(weights), np.float32)


def _whole(matrix: Quantised, zeros: Node | None = None) -> Node:
    """The weights as the kernels want to see them: integers, less their zeros, times scales."""
    fit_half = (matrix.scales.astype(np.float16) == matrix.scales).all()
    kind = np.float16 if zeros is None and fit_half else np.float32
    if zeros is None and matrix.zeros is not None:
        zeros = op.convert(op.constant(matrix.zeros[..., None]), kind)
    codes = op.convert(_codes(matrix), kind)
    if zeros is not None:
        codes = op.subtract(codes, zeros)
    rows, n_groups, _ = matrix.codes.shape
    scaled = op.multiply(codes, op.constant(matrix.scales[..., None].astype(kind)))
    whole = op.reshape(scaled, _ints(rows, n_groups * GROUP), False)
    return whole if kind is np.float32 else op.convert(whole, np.float32)


def _codes(matrix: Quantised) -> Node:
    if matrix.bits == 8:
        return op.constant(matrix.codes)
    kind = openvino.Type.i4 if matrix.zeros is None else openvino.Type.u4
    pairs = matrix.codes.view(np.uint8).reshape(-1, 2) & 15
    tensor = openvino.Tensor(kind, openvino.Shape(matrix.codes.shape))
    tensor.data[:] = (
        (pairs[:, 0] | pairs[:, 1] << 4).reshape(tensor.data.shape).view(tensor.data.dtype)
    )
    return op.constant(tensor, shared_memory=False)


def _rest(offsets: NDArray[np.float32]) -> Node:
    """The rest of offsets, less than half a weight's step, as bytes with a scale for each row."""
    scales = np.abs(offsets).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(offsets, scales, out=np.zeros_like(offsets), where=scales != 0))
    weights = op.convert(op.constant(codes.astype(np.int8)), np.float32)
    return op.multiply(weights, op.constant(scales))
