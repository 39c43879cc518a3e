"""The trained model's file, from made-up weights, read back with `gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray

from tools.builtin_model.export import write_gguf
from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import ModelShape

SHAPE = ModelShape("little", 2, 64, 96, 4, 2, 32, 6, 128)
TOKENS = [*CONTROL_TOKENS, "a", "b", "ab"]


def weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    made = {"embedding.weight": draw(6, 64), "norm.weight": draw(64)}
    for layer in range(2):
        block = f"blocks.{layer}"
        made |= {
            f"{block}.attention_norm.weight": draw(64),
            f"{block}.attention.qkv.weight": draw(4 * 32 + 2 * 2 * 32, 64),
            f"{block}.attention.q_norm.weight": draw(32),
            f"{block}.attention.k_norm.weight": draw(32),
            f"{block}.attention.output.weight": draw(64, 4 * 32),
            f"{block}.ffn_norm.weight": draw(64),
            f"{block}.gate_up.weight": draw(2 * 96, 64),
            f"{block}.down.weight": draw(64, 96),
        }
    return made


def test_every_weight_is_where_llama_cpp_looks_for_it(tmp_path: Path) -> None:
    made = weights()
    write_gguf(tmp_path / "m.gguf", SHAPE, made, TOKENS, [("a", "b")])
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    qkv, gate_up = made["blocks.1.attention.qkv.weight"], made["blocks.1.gate_up.weight"]
    expected = {
        "token_embd.weight": made["embedding.weight"],
        "blk.1.attn_q.weight": qkv[:128],
        "blk.1.attn_k.weight": qkv[128:192],
        "blk.1.attn_v.weight": qkv[192:],
        "blk.1.attn_output.weight": made["blocks.1.attention.output.weight"],
        "blk.1.ffn_gate.weight": gate_up[:96],
        "blk.1.ffn_up.weight": gate_up[96:],
        "blk.1.ffn_down.weight": made["blocks.1.down.weight"],
    }
    for name, matrix in expected.items():
        tensor = tensors[name]
        assert tensor.tensor_type == GGMLQuantizationType.Q8_0
        # Half a step, of 127 to the largest weight; the step itself is rounded to an F16.
        error = np.abs(dequantize(tensor.data, tensor.tensor_type) - matrix)
        assert error.max() <= np.abs(matrix).max() / 127 * 0.6
    for name, norm in {
        "output_norm.weight": made["norm.weight"],
        "blk.0.attn_norm.weight": made["blocks.0.attention_norm.weight"],
        "blk.0.attn_q_norm.weight": made["blocks.0.attention.q_norm.weight"],
        "blk.0.attn_k_norm.weight": made["blocks.0.attention.k_norm.weight"],
        "blk.0.ffn_norm.weight": made["blocks.0.ffn_norm.weight"],
    }.items():
        np.testing.assert_array_equal(tensors[name].data, norm)
    assert len(tensors) == 2 + 2 * 11


def test_the_end_of_a_turn_ends_the_generation(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, weights(), TOKENS, [("a", "b")])
    reader = GGUFReader(tmp_path / "m.gguf")
    end = reader.get_field("tokenizer.ggml.eos_token_id")
    assert end is not None
    assert TOKENS[end.contents()] == "<|im_end|>"
