"""Builds OpenVINO's graph of a GGUF model, by the table of its architecture.

The graph is the one that OpenVINO's own tools write for such models, so that its passes know it. Keys and
values are state, which paged attention replaces. The rotary embedding and the norms are written out.
What attention has in single layers is in `GraphNotes`, until paged attention is there to have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from openvino import opset13 as op
from openvino.utils.node_factory import NodeFactory

from serve_app.base.errors import ConfigError
from serve_app.base.formats import Quantization
from serve_app.kernels.openvino.gguf_model import GgufModel, Rotary, Tensor
from serve_app.kernels.openvino.parts import WHOLE, ModelPart
from serve_app.kernels.openvino.weights import (
    GROUP,
    HADAMARD,
    Quantised,
    floats,
    is_quantised,
    quantise,
    round_matrix,
)

HIDDEN = "hidden_states"
TOKENS, EMBEDS = "input_ids", "inputs_embeds"
"""Inputs of decoders: tokens or vectors. Vectors are rows of the matrix of embeddings, or for a part of a
model, hidden states of the part before it."""
VECTORS = "vectors"
MASK, WINDOW_MASK = "mask", "window_mask"
"""Inputs of encoders: what is added to the scores of attention, for two tokens of each group."""
GROUPED, PLACES = "grouped", "places"
"""Inputs of encoders: the tokens of each group, and the place of each token in all groups."""
FREQUENCIES, WINDOW_FREQUENCIES = "rotary_frequencies", "rotary_frequencies_of_windows"

# The clamp and the slope of gpt-oss's experts. Source: llama.cpp, `build_moe_ffn`.
_CLAMP, _GATE_SLOPE = np.float32(7), np.float32(1.702)
_GATE_UP = ("gate", "up")
_FACTORY = NodeFactory("opset13")  # its function for attention knows no sinks

Node = Any
_Rows = tuple[str, NDArray[np.intp] | slice]
"""The name of a matrix, and some of its rows."""
_NONE = np.empty(0, np.float32)


class LayerNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of attention in one layer."""

    window: int = 0
    """Tokens that a token sees, with itself; 0 for all."""
    frequencies: str | None = FREQUENCIES
    """The name of the constant that says how far positions turn; None if they do not."""


class GraphNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a graph's attention, which its runtime information has."""

    layers: list[LayerNotes] = []
    long_frequencies: list[float] = []
    """Frequencies for contexts longer than `n_ctx_train`, instead of those in the graph; empty for none."""
    n_ctx_train: int = 0

    def add_to(self, graph: openvino.Model) -> None:
        graph.set_rt_info(msgspec.json.encode(self).decode(), [_NOTES])

    @classmethod
    def of(cls, graph: openvino.Model) -> GraphNotes:
        return msgspec.json.decode(graph.get_rt_info([_NOTES]).astype(str), type=cls)


_NOTES = "corral_attention"


def build(
    files: Sequence[Path],
    tell: Callable[[float], None],
    part: ModelPart = WHOLE,
    quantization: Quantization = "none",
) -> openvino.Model:
    """The graph of the model in these files, or of a part of it; `tell` is told now and then how much of it
    is there. Raises ConfigError for a model that it does not know, with the reason as the rest of a
    sentence."""
    model = GgufModel(files, part, quantization)
    graph = (_Encoder if model.kind.encodes else _Decoder)(model, tell).build()
    if quantization == "w8a8":  # the group of values that the kernels round with one scale
        graph.set_rt_info(model.group, ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    if model.names_left:
        more = f" and {len(model.names_left) - 1} more" if len(model.names_left) > 1 else ""
        raise ConfigError(f"its tensor {model.names_left[0]}{more} would not be used")
    return graph


@dataclass(frozen=True, slots=True)
class _Turns:
    """Cosines and sines by which positions turn the dimensions of a head."""

    cos: Node
    sin: Node


class _Graph:
    """The graph while it is built: what decoders and encoders have in common."""

    def __init__(
        self, model: GgufModel, tell: Callable[[float], None], inputs: Mapping[str, Node]
    ) -> None:
        self._model, self._tell = model, tell
        self._kind = model.kind
        self._n_head = model.count("attention.head_count")
        self._n_head_kv = model.count("attention.head_count_kv", self._n_head)
        self._head = model.head_size
        self._order = model.rotary.order(self._kind.pairs == "neighbours")
        norm = "layer_norm_epsilon" if model.kind.encodes else "layer_norm_rms_epsilon"
        self._epsilon = float(model.value(f"attention.{norm}"))
        self._residual_scale = model.value("residual_scale", 1.0) if self._kind.scaled else 1.0
        self._inputs = inputs
        for name, parameter in inputs.items():
            parameter.output(0).set_names({name})
        shape = op.shape_of(self._inputs[TOKENS if TOKENS in inputs else EMBEDS])
        self._n_texts = op.gather(shape, _ints(0), _int(0))
        self._positions = op.convert(self._inputs["position_ids"], np.float32)
        self._turns: dict[str, _Turns] = {}

    def _embed(self, tensor: Tensor) -> Node:
        """The rows of the tokens in the matrix of embeddings."""
        ids = op.convert(self._inputs[TOKENS], np.int32)
        return op.gather(_rows(tensor), ids, op.constant(np.int32(0)))

    def _layers(self, notes: GraphNotes, hidden: Node) -> Node:
        for index, layer in zip(self._model.layers, notes.layers, strict=True):
            hidden = self._layer(index, layer, hidden)
            self._tell(self._model.taken_part)
        return hidden

    def _notes(self) -> GraphNotes:
        model, kind = self._model, self._kind
        windows = model.windows
        rotary, *longer = map(model.rotary.frequencies, model.rotary_factors or (None,))
        self._turns[FREQUENCIES] = self._turned_by(FREQUENCIES, rotary, model.rotary)
        if any(windows):
            frequencies = model.window_rotary.frequencies()
            self._turns[WINDOW_FREQUENCIES] = self._turned_by(
                WINDOW_FREQUENCIES, frequencies, model.window_rotary
            )
        layers = []
        for index in model.layers:
            window = windows[index]
            is_last = kind.unrotated > 0 and (index + 1) % kind.unrotated == 0
            name: str | None = WINDOW_FREQUENCIES if window else FREQUENCIES
            if is_last or (kind.full_unrotated and any(windows) and not window):
                name = None
            layers.append(LayerNotes(window, name))
        return GraphNotes(
            layers, [float(x) for one in longer for x in one], model.rotary.n_ctx_train
        )

    def _turned_by(self, name: str, frequencies: NDArray[np.float32], rotary: Rotary) -> _Turns:
        constant = op.constant(frequencies.reshape(1, -1, 1))
        constant.set_friendly_name(name)
        shape = op.concat([self._n_texts, _ints(1), _ints(1)], 0)
        positions = op.unsqueeze(self._positions, _int(1))
        spread = op.broadcast(constant, shape, broadcast_spec="BIDIRECTIONAL")
        angles = op.transpose(
            op.matmul(spread, positions, False, False), op.constant(np.array([0, 2, 1], np.int32))
        )
        both = op.concat([angles, angles], -1)
        turns = [op.unsqueeze(turn(both), _int(1)) for turn in (op.cos, op.sin)]
        if rotary.magnitude != 1:
            n_pairs = self._head // 2
            turned = np.arange(n_pairs) < (rotary.n_turned or self._head) // 2
            factors = np.tile(np.where(turned, rotary.magnitude, 1), 2).astype(np.float32)
            turns = [op.multiply(turn, op.constant(factors)) for turn in turns]
        return _Turns(*turns)

    def _layer(self, index: int, notes: LayerNotes, hidden: Node) -> Node:
        kind, block = self._kind, f"blk.{index}."
        normed = self._norm(kind.attention_norm, hidden, block)
        attended = self._attention(block, index, notes, normed)
        added = self._product(f"{block}attn_output", attended)
        hidden = self._add(hidden, added, kind.attention_post_norm, block)
        normed = self._norm(kind.ffn_norm, hidden, block)
        added = self._feed_forward(block, normed)
        return self._add(hidden, added, kind.ffn_post_norm, block)

    def _add(self, hidden: Node, added: Node, norm: str | None, block: str) -> Node:
        if self._kind.norms_sums:
            return self._norm(norm, op.add(hidden, added), block)
        return op.add(hidden, _scale(self._norm(norm, added, block), self._residual_scale))

    def _feed_forward(self, block: str, hidden: Node) -> Node:
        kind = self._kind
        if kind.experts:
            added = self._experts(block, hidden)
            return self._with_shared(block, hidden, added) if kind.shared_expert else added
        if not kind.gated:
            inner = self._activate(self._product(f"{block}ffn_up", hidden))
            return self._product(f"{block}ffn_down", inner)
        if kind.gate_in_up:
            n_ff = self._model.count("feed_forward_length")
            halves = slice(n_ff), slice(n_ff, None)
            gate, up = (self._product(f"{block}ffn_up", hidden, half) for half in halves)
        else:
            gate, up = (self._product(f"{block}ffn_{name}", hidden) for name in ("gate", "up"))
        return self._product(f"{block}ffn_down", op.multiply(self._activate(gate), up))

    def _activate(self, values: Node) -> Node:
        activation = self._model.value("hidden_activation", self._kind.activation)
        return op.swish(values) if activation == "silu" else op.gelu(values, "tanh")

    def _experts(self, block: str, hidden: Node) -> Node:
        """The sum of the chosen experts. Every expert is written out for every token: OpenVINO knows this
        shape, and computes the chosen ones. Source: OpenVINO, `ConvertTiledMoeBlockToGatherMatmuls`."""
        model = self._model
        n, width = model.count("expert_count"), model.count("embedding_length")
        rows = op.reshape(hidden, _ints(-1, width), False)
        scores = op.softmax(self._product(f"{block}ffn_gate_inp", rows), -1)
        best = op.topk(scores, _int(model.count("expert_used_count")), -1, "max", "value", "i64")
        shares, chosen = best.output(0), best.output(1)
        if self._kind.normed_experts:
            shares = op.divide(shares, op.reduce_sum(shares, _ints(-1), True))
        tiled = op.reshape(op.tile(rows, _ints(n, 1)), _ints(n, -1, width), False)
        if self._kind.clamped_experts:
            inner = self._clamp_experts(block, tiled)
        else:
            gate, up = (self._expert_product(tiled, f"{block}ffn_{one}_exps") for one in _GATE_UP)
            # op.swish has a parameter, and is not known.
            inner = op.multiply(op.multiply(gate, op.sigmoid(gate)), up)
        added = self._expert_product(inner, f"{block}ffn_down_exps")
        added = op.reshape(added, op.concat([_ints(n), self._n_texts, _ints(-1, width)], 0), False)
        zeros = op.broadcast(op.constant(np.float32(0)), op.shape_of(scores))
        spread = op.scatter_elements_update(zeros, chosen, shares, _int(1))
        spread = op.transpose(spread, _ints(1, 0))
        spread = op.reshape(spread, op.concat([_ints(n), self._n_texts, _ints(-1)], 0), False)
        return op.reduce_sum(op.multiply(added, op.unsqueeze(spread, _int(-1))), _ints(0), False)

    def _clamp_experts(self, block: str, tiled: Node) -> Node:
        """The inner values of gpt-oss's experts. OpenVINO knows these experts if gate and up are one
        product, with their rows in turns."""
        both = self._expert_product(tiled, *(f"{block}ffn_{one}_exps" for one in _GATE_UP))
        end = 2 * self._model.count("expert_feed_forward_length")
        gate, up = (op.slice(both, _ints(at), _ints(end), _ints(2), _ints(-1)) for at in (0, 1))
        gate = op.swish(op.minimum(gate, op.constant(_CLAMP)), op.constant(_GATE_SLOPE))
        return op.multiply(op.add(op.clamp(up, -_CLAMP, _CLAMP), op.constant(np.float32(1))), gate)

    def _expert_product(self, values: Node, *names: str) -> Node:
        """The product with the matrices of these names, of all experts, whose rows are in turns; with their
        biases."""
        model, tensors = self._model, [self._model.take(f"{name}.weight") for name in names]
        if len({tensor.kind for tensor in tensors}) > 1:
            raise ConfigError(f"{' and '.join(names)} have different formats")
        n_experts, _, n_bytes = tensors[0].data.shape
        data = np.stack([tensor.data for tensor in tensors], 2).reshape(n_experts, -1, n_bytes)
        product = op.matmul(values, _experts(data, tensors[0].kind), False, True)
        if not model.has(f"{names[0]}.bias"):
            return product
        biases = np.stack([model.vector(f"{name}.bias") for name in names], 2)
        return op.add(product, op.constant(biases.reshape(n_experts, 1, -1)))

    def _with_shared(self, block: str, hidden: Node, added: Node) -> Node:
        gate, up = (self._product(f"{block}ffn_{name}_shexp", hidden) for name in ("gate", "up"))
        inner = self._product(f"{block}ffn_down_shexp", op.multiply(op.swish(gate), up))
        share = op.constant(self._model.vector(f"{block}ffn_gate_inp_shexp.weight")[:, None])
        return op.add(added, op.multiply(inner, op.sigmoid(op.matmul(hidden, share, False, False))))

    def _attention(self, block: str, index: int, notes: LayerNotes, hidden: Node) -> Node:
        n, n_kv, head = self._n_head, self._n_head_kv, self._head
        query, key, value = self._heads(block, hidden)
        if notes.frequencies is not None:
            turns = self._turns[notes.frequencies]
            query, key = self._turn(query, turns), self._turn(key, turns)
        query = self._warm(query)
        query, keys, values, mask = self._attention_inputs(index, notes, query, key, value)
        if n != n_kv:
            keys, values = self._repeat(keys), self._repeat(values)
        scale = op.constant(np.float32(self._attention_scale))
        inputs = [query, keys, values, mask, scale]
        if self._kind.sinks:
            sinks = self._model.vector(f"{block}attn_sinks.weight")
            inputs.append(op.constant(sinks.reshape(1, n, 1, 1)))
        attended = _FACTORY.create("ScaledDotProductAttention", inputs, {"causal": False})
        attended = op.transpose(attended, op.constant(np.array([0, 2, 1, 3], np.int32)))
        return self._in_order(op.reshape(attended, _ints(0, 0, n * head), True))

    def _attention_inputs(
        self, index: int, notes: LayerNotes, query: Node, key: Node, value: Node
    ) -> tuple[Node, Node, Node, Node]:
        """The queries, the keys and values that they see, and the mask."""
        raise NotImplementedError

    def _in_order(self, attended: Node) -> Node:
        """The outputs of attention, in the order of the tokens."""
        return attended

    @property
    def _attention_scale(self) -> float:
        model, scale = self._model, 0.0
        if self._kind.scaled:
            scale = model.value("attention.scale", 0.0)
        size = self._head
        if model.count("block_count") == self._kind.layers_scaled_by_width:
            size = model.count("embedding_length") // self._n_head
        return scale or 1 / math.sqrt(size)

    def _heads(self, block: str, hidden: Node) -> list[Node]:
        """Queries, keys and values, by head."""
        head, kinds = self._head, "qkv"
        sizes = (self._n_head, self._n_head_kv, self._n_head_kv)
        orders = (self._order, self._order, np.arange(head))
        rows = [
            (np.arange(n)[:, None] * head + order).reshape(-1)
            for n, order in zip(sizes, orders, strict=True)
        ]
        matrices: list[_Rows] = [(f"{block}attn_{kinds[i]}", rows[i]) for i in range(3)]
        if self._model.has(f"{block}attn_qkv.weight"):
            starts = np.cumsum([0, *sizes]) * head
            matrices = [(f"{block}attn_qkv", starts[i] + rows[i]) for i in range(3)]
        heads = []
        for i, flat in enumerate(self._products(hidden, matrices)):
            name = f"{block}attn_{kinds[i]}_norm.weight"
            weights = self._model.vector(name) if self._model.has(name) else _NONE
            if len(weights) > head:
                flat = self._rms_norm(flat, weights[rows[i]])
            values = op.reshape(flat, _ints(0, 0, sizes[i], head), True)
            if len(weights) == head:
                values = self._rms_norm(values, weights[orders[i]])
            heads.append(op.transpose(values, op.constant(np.array([0, 2, 1, 3], np.int32))))
        return heads

    def _turn(self, heads: Node, turns: _Turns) -> Node:
        half, end, step, axis = _ints(self._head // 2), _ints(2**63 - 1), _ints(1), _ints(3)
        second = op.slice(heads, half, end, step, axis)
        negative = op.multiply(second, op.constant(np.float32(-1)))
        first = op.slice(heads, _ints(0), half, step, axis)
        across = op.concat([negative, first], -1)
        return op.add(op.multiply(heads, turns.cos), op.multiply(across, turns.sin))

    def _warm(self, query: Node) -> Node:
        """Queries that are scaled by their position: by 1 in the first context of training, and by more in
        each further one. Source: llama.cpp, `llm_graph_input_attn_temp`."""
        model = self._model
        scale = model.value("attention.temperature_scale", 0.0) if self._kind.temperature else 0.0
        if not scale:
            return query
        n_contexts = op.floor(_scale(self._positions, 1 / model.rotary.n_ctx_train))
        one = op.constant(np.float32(1))
        factor = op.add(_scale(op.log(op.add(n_contexts, one)), scale), one)
        return op.multiply(query, op.unsqueeze(factor, _ints(1, 3)))

    def _repeat(self, heads: Node) -> Node:
        n, n_kv, head = self._n_head, self._n_head_kv, self._head
        shape = op.shape_of(heads)
        texts, length = (op.gather(shape, _ints(at), _int(0)) for at in (0, 2))
        wanted = op.concat([texts, _ints(n_kv), _ints(n // n_kv), length, _ints(head)], 0)
        spread = op.broadcast(op.unsqueeze(heads, _int(2)), wanted, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(spread, _ints(0, n, -1, head), True)

    def _norm(self, name: str | None, values: Node, block: str = "") -> Node:
        if name is None:
            return values
        name = f"{block}{name}"
        if not self._kind.encodes:
            return self._rms_norm(values, self._model.vector(f"{name}.weight"))
        if not self._model.has(f"{name}.weight"):
            return values
        normed = op.mvn(values, _ints(-1), True, self._epsilon, "inside_sqrt")
        normed = op.multiply(normed, op.constant(self._model.vector(f"{name}.weight")))
        if self._model.has(f"{name}.bias"):
            normed = op.add(normed, op.constant(self._model.vector(f"{name}.bias")))
        return normed

    def _rms_norm(self, values: Node, weights: NDArray[np.float32]) -> Node:
        square = op.power(values, op.constant(np.float32(2)))
        mean = op.reduce_mean(square, op.constant(np.array([-1], np.int32)), True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(self._epsilon))))
        normed = op.multiply(values, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(normed, op.constant(weights))

    def _product(self, name: str, values: Node, rows: slice = slice(None)) -> Node:
        """The product with rows of the matrix of that name, and its bias if it has one."""
        (product,) = self._products(values, [(name, rows)])
        return product

    def _products(self, values: Node, matrices: Sequence[_Rows]) -> list[Node]:
        """The products with rows of the matrices of these names, and their biases. Matrices of one format
        are one product, as each product takes some time besides that of its weights."""
        tensors = [self._model.take(f"{name}.weight") for name, _ in matrices]
        by_kind: dict[Kind, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_kind.setdefault(tensor.kind, []).append(i)
        products: dict[int, Node] = {}
        for kind, places in by_kind.items():
            weights = [tensors[i].data[matrices[i][1]] for i in places]
            data = np.concatenate(weights)
            if self._model.rounds(tensors[places[0]]):
                product = _times_rounded(values, data, kind, self._model.group)
            else:
                product = _times(values, data, kind)
            lengths = list(map(len, weights))
            biases = [self._bias(*matrices[i], n) for i, n in zip(places, lengths, strict=True)]
            if any(bias.any() for bias in biases):
                product = op.add(product, op.constant(np.concatenate(biases)))
            parts = [product]
            if len(places) > 1:
                parts = op.variadic_split(product, _int(-1), _ints(*lengths)).outputs()
            products |= zip(places, parts, strict=True)
        return [products[i] for i in range(len(matrices))]

    def _bias(self, name: str, rows: NDArray[np.intp] | slice, n: int) -> NDArray[np.float32]:
        has_bias = self._model.has(f"{name}.bias")
        return self._model.vector(f"{name}.bias")[rows] if has_bias else np.zeros(n, np.float32)


class _Decoder(_Graph):
    """A decoder's graph, with the keys and values that it keeps as its state."""

    def __init__(self, model: GgufModel, tell: Callable[[float], None]) -> None:
        if model.part.is_whole:
            inputs = {TOKENS: op.parameter([-1, -1], np.int64, name=TOKENS)}
        else:
            shape = [-1, -1, model.count("embedding_length")]
            inputs = {EMBEDS: op.parameter(shape, np.float32, name=EMBEDS)}
        inputs |= {
            "attention_mask": op.parameter([-1, -1], np.int64, name="attention_mask"),
            "position_ids": op.parameter([-1, -1], np.int64, name="position_ids"),
            "beam_idx": op.parameter([-1], np.int32, name="beam_idx"),
        }
        super().__init__(model, tell, inputs)
        self._sinks: list[Node] = []

    def build(self) -> openvino.Model:
        part, notes = self._model.part, self._notes()
        hidden = self._first() if part.index == 0 else self._inputs[EMBEDS]
        hidden = self._layers(notes, hidden)
        result = op.result(self._logits(hidden) if part.is_last else hidden)
        result.output(0).set_names({"logits" if part.is_last else HIDDEN})
        graph = openvino.Model([result], self._sinks, list(self._inputs.values()), "model")
        notes.add_to(graph)
        return graph

    def _first(self) -> Node:
        """The hidden states before the first layer."""
        model, kind = self._model, self._kind
        width = model.count("embedding_length")
        scale = model.value("embedding_scale", 1.0) if kind.scaled else 1.0
        if model.part.is_whole:
            embedded = self._embed(model.take("token_embd.weight"))
        else:
            embedded = self._inputs[EMBEDS]
        return _scale(embedded, math.sqrt(width) if kind.normed_embeddings else scale)

    def _logits(self, hidden: Node) -> Node:
        """The logits of hidden states behind the last layer."""
        model = self._model
        hidden = self._norm("output_norm", hidden)
        hidden.output(0).set_names({HIDDEN})
        if model.has("output.weight"):
            logits = self._product("output", hidden)
        else:
            logits = self._product("token_embd", hidden)
        if self._kind.scaled:
            logits = _scale(logits, 1 / model.value("logit_scale", 1.0))
        if cap := model.value("final_logit_softcapping", 0.0):
            logits = _scale(op.tanh(_scale(logits, 1 / cap)), cap)
        return logits

    def _attention_inputs(
        self, index: int, notes: LayerNotes, query: Node, key: Node, value: Node
    ) -> tuple[Node, Node, Node, Node]:
        keys = self._extend(f"past_key_values.{index}.key", f"present.{index}.key", key)
        values = self._extend(f"past_key_values.{index}.value", f"present.{index}.value", value)
        mask = op.constant(np.zeros((1, 1, 1, 1), np.float32))  # paged attention has its own
        return query, keys, values, mask

    def _extend(self, past: str, present: str, new: Node) -> Node:
        n_kv, head = self._n_head_kv, self._head
        shape = op.concat([self._n_texts, _ints(n_kv), _ints(0), _ints(head)], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        name = past + present
        cached = op.read_value(empty, name, np.float32, openvino.PartialShape([-1, n_kv, -1, head]))
        chosen = op.gather(cached, self._inputs["beam_idx"], _int(0))
        rows = op.concat([chosen, new], 2)
        self._sinks.append(op.assign(rows, name))
        return rows


class _Encoder(_Graph):
    """An encoder's graph. Several texts are one row of tokens. Attention has them in groups, each filled up
    to the longest, and masks part the texts of a group."""

    def __init__(self, model: GgufModel, tell: Callable[[float], None]) -> None:
        names = TOKENS, "position_ids", GROUPED
        inputs = {name: op.parameter([-1, -1], np.int64, name=name) for name in names}
        inputs[PLACES] = op.parameter([-1], np.int64, name=PLACES)
        for name in (MASK, WINDOW_MASK) if any(model.windows) else (MASK,):
            inputs[name] = op.parameter([-1, 1, -1, -1], np.float32, name=name)
        super().__init__(model, tell, inputs)

    def build(self) -> openvino.Model:
        model = self._model
        hidden = self._embed(model.take("token_embd.weight"))
        if model.has("token_types.weight"):  # all are of the first kind
            kinds = model.take("token_types.weight")
            hidden = op.add(hidden, op.constant(floats(kinds.data[:1], kinds.kind)[0].astype("f4")))
        if model.has("position_embd.weight"):
            places = _rows(model.take("position_embd.weight"))
            hidden = op.add(hidden, op.gather(places, self._inputs["position_ids"], _int(0)))
        hidden = self._norm("token_embd_norm", hidden)
        notes = self._notes()
        hidden = self._norm("output_norm", self._layers(notes, hidden))
        if model.classifies_means:
            hidden = self._means(hidden)
        if model.has("cls.weight"):
            hidden = self._product("cls", hidden)
            is_modern = self._kind.modern_classifier
            hidden = op.gelu(hidden, "tanh") if is_modern else op.tanh(hidden)
            hidden = self._norm("cls.norm", hidden)
        if model.has("cls.output.weight"):
            hidden = self._product("cls.output", hidden)
        result = op.result(hidden)
        result.output(0).set_names({VECTORS})
        return openvino.Model([result], list(self._inputs.values()), "model")

    def _attention_inputs(
        self, index: int, notes: LayerNotes, query: Node, key: Node, value: Node
    ) -> tuple[Node, Node, Node, Node]:
        query, key, value = (self._group(heads) for heads in (query, key, value))
        return query, key, value, self._inputs[WINDOW_MASK if notes.window else MASK]

    def _means(self, hidden: Node) -> Node:
        """The mean of each token's text: all that a token sees has the same share."""
        shares = op.softmax(self._inputs[MASK], -1)
        values = self._group(op.unsqueeze(hidden, _int(1)))
        return self._in_order(op.matmul(shares, values, False, False))

    def _group(self, heads: Node) -> Node:
        """Heads of shape [groups, heads, tokens, head size], of [1, heads, tokens, head size]."""
        by_head = op.gather(op.squeeze(heads, _ints(0)), self._inputs[GROUPED], _int(1))
        return op.transpose(by_head, op.constant(np.array([1, 0, 2, 3], np.int32)))

    def _in_order(self, attended: Node) -> Node:
        rows = op.reshape(attended, _ints(-1, self._n_head * self._head), False)
        return op.unsqueeze(op.gather(rows, self._inputs[PLACES], _int(0)), _int(0))


def _scale(values: Node, factor: float) -> Node:
    return values if factor == 1 else op.multiply(values, op.constant(np.float32(factor)))


def _ints(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _int(value: int) -> Node:
    return op.constant(np.int64(value))


def _times(values: Node, data: NDArray[Any], kind: Kind) -> Node:
    """The product with a matrix."""
    if not is_quantised(kind):
        return op.matmul(values, _plain(floats(data, kind)), False, True)
    matrix = quantise(data, kind)
    if matrix.offsets is not None:
        n_groups = matrix.codes.shape[1]
        matrix = matrix.with_sums()
        values = _with_sums(values, n_groups, matrix.codes.shape[1])
    return op.matmul(values, _whole(matrix, None, data.shape[:1]), False, True)


def _times_rounded(values: Node, data: NDArray[Any], kind: Kind, group: int) -> Node:
    """The product with a matrix of integers of 8 bits, as `Quantization` says.

    The kernels round the values, too. A few large ones would make the steps of their group coarse, so all
    are turned first. Products of the same values share that: OpenVINO joins what is alike."""
    matrix = round_matrix(data, kind, group)
    width = matrix.codes[0].size
    blocks = op.reshape(values, _ints(0, -1, GROUP), True)
    turned = op.matmul(blocks, op.constant(HADAMARD), False, False)
    turned = op.reshape(turned, _ints(0, -1, width), True)
    return op.matmul(turned, _whole(matrix, None, data.shape[:1]), False, True)


def _with_sums(values: Node, n_groups: int, n_groups_with_sums: int) -> Node:
    """The values, and behind them the sum of each of their groups, and zeros up to whole groups."""
    # Sums over three dimensions take half the time of sums over four.
    sums = op.reduce_sum(op.reshape(values, _ints(0, -1, GROUP), True), _ints(2), False)
    sums = op.reshape(sums, _ints(0, -1, n_groups), True)
    n_zeros = (n_groups_with_sums - n_groups) * GROUP - n_groups
    if n_zeros:
        zero = op.constant(np.float32(0))
        sums = op.pad(sums, _ints(0, 0, 0), _ints(0, 0, n_zeros), "constant", zero)
    return op.concat([values, sums], -1)


def _rows(tensor: Tensor) -> Node:
    """A matrix from which single rows are taken: offsets need not be whole there."""
    if not is_quantised(tensor.kind):
        return _plain(floats(tensor.data, tensor.kind))
    matrix = quantise(tensor.data, tensor.kind)
    return _whole(matrix, _exact_zeros(matrix), tensor.data.shape[:-1])


def _experts(data: NDArray[Any], kind: Kind) -> Node:
    """The matrices of all experts, of shape [experts, rows, columns]. Products with them take offsets that
    are not whole."""
    if not is_quantised(kind):
        return _plain(floats(data, kind))
    n_experts, n_rows, n_bytes = data.shape
    matrix = quantise(data.reshape(-1, n_bytes), kind)
    return _whole(matrix, _exact_zeros(matrix), (n_experts, n_rows))


def _exact_zeros(matrix: Quantised) -> NDArray[np.float32] | None:
    """The codes that stand for 0 in each group."""
    if matrix.offsets is None:
        return None
    scales = np.where(matrix.scales == 0, 1, matrix.scales)
    zeros = (0 if matrix.zeros is None else matrix.zeros) - matrix.offsets / scales
    return zeros.astype(np.float32)


def _plain(weights: NDArray[Any]) -> Node:
    return op.convert(op.constant(weights), np.float32)


def _whole(matrix: Quantised, zeros: NDArray[np.float32] | None, shape: tuple[int, ...]) -> Node:
    """The weights as the kernels want to see them: integers, less their zeros, times scales. `shape` is
    that of the rows. Without `zeros`, the matrix's own are used, which are integers."""
    _, n_groups, group = matrix.codes.shape
    fit_half = (matrix.scales.astype(np.float16) == matrix.scales).all()
    kind = np.float16 if zeros is None and fit_half else np.float32
    codes = op.convert(_codes(matrix, (*shape, n_groups, group)), kind)
    if zeros is not None:
        codes = op.subtract(codes, op.constant(zeros.reshape(*shape, n_groups, 1)))
    elif matrix.zeros is not None:
        whole_zeros = op.constant(matrix.zeros.reshape(*shape, n_groups, 1))
        codes = op.subtract(codes, op.convert(whole_zeros, kind))
    scales = matrix.scales.reshape(*shape, n_groups, 1).astype(kind)
    scaled = op.multiply(codes, op.constant(scales))
    whole = op.reshape(scaled, _ints(*shape, n_groups * group), False)
    return whole if kind is np.float32 else op.convert(whole, np.float32)


def _codes(matrix: Quantised, shape: tuple[int, ...]) -> Node:
    if matrix.bits == 8:
        return op.constant(matrix.codes.reshape(shape))
    kind = openvino.Type.i4 if matrix.zeros is None else openvino.Type.u4
    codes = matrix.codes.view(np.uint8).reshape(-1)
    tensor = openvino.Tensor(kind, openvino.Shape(shape))
    packed = tensor.data.reshape(-1).view(np.uint8)
    np.bitwise_and(codes[::2], 15, out=packed)  # in place: the output may have 10^9 codes
    packed |= codes[1::2] << 4
    return op.constant(tensor, shared_memory=False)
