"""The file that `write_random_gguf` leaves, read back with `gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, TokenType, dequantize

from tools.chat_template import CONTROL_TOKENS
from tools.gguf_file import ModelShape
from tools.random_models.model import SHAPES, TYPES, main, parameter_count, write_random_gguf

TINY = SHAPES["tiny"]
# Grouped heads that do not add up to n_embd, and a vocabulary past the learned merges.
ODD = ModelShape("odd", 1, 64, 96, 3, 1, 32, 1500, 128)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_random_gguf(path, TINY, "f16")
    return GGUFReader(path)


def value(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def strings(reader: GGUFReader, key: str) -> list[str]:
    found = value(reader, key)
    assert isinstance(found, list)
    return [str(item) for item in found]


def test_hyperparameters(tiny: GGUFReader) -> None:
    assert value(tiny, "general.architecture") == "qwen3"
    assert value(tiny, "general.name") == TINY.name
    assert value(tiny, "qwen3.block_count") == TINY.n_layer
    assert value(tiny, "qwen3.context_length") == TINY.n_ctx_train
    assert value(tiny, "qwen3.embedding_length") == TINY.n_embd
    assert value(tiny, "qwen3.feed_forward_length") == TINY.n_ff
    assert value(tiny, "qwen3.attention.head_count") == TINY.n_head
    assert value(tiny, "qwen3.attention.head_count_kv") == TINY.n_head_kv
    assert value(tiny, "qwen3.attention.key_length") == TINY.head_dim
    assert value(tiny, "qwen3.attention.value_length") == TINY.head_dim


def test_vocabulary(tiny: GGUFReader) -> None:
    tokens = strings(tiny, "tokenizer.ggml.tokens")
    assert len(tokens) == len(set(tokens)) == TINY.n_vocab
    assert tuple(tokens[-3:]) == CONTROL_TOKENS
    assert value(tiny, "tokenizer.ggml.token_type") == [
        *[TokenType.NORMAL] * (TINY.n_vocab - 3),
        *[TokenType.CONTROL] * 3,
    ]
    eos, pad = (value(tiny, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "padding"))
    assert (eos, pad) == (tokens.index("<|im_end|>"), tokens.index("<|endoftext|>"))
    assert value(tiny, "tokenizer.ggml.add_bos_token") is False
    assert "Ġthe" in tokens


@pytest.mark.parametrize("shape", [TINY, ODD], ids=lambda shape: shape.name)
def test_every_merge_joins_two_tokens_into_a_third(shape: ModelShape, tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "m.gguf", shape, "q8_0")
    reader = GGUFReader(tmp_path / "m.gguf")
    tokens = strings(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == shape.n_vocab
    merges = [tuple(merge.split(" ")) for merge in strings(reader, "tokenizer.ggml.merges")]
    assert len(merges) == len(set(merges))
    known = set(tokens[:256])
    for left, right in merges:
        assert {left, right} <= known
        known.add(left + right)
    assert known == set(tokens[:-3])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [TINY, ODD], ids=lambda shape: shape.name)
def test_tensors(shape: ModelShape, dtype: str, tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "m.gguf", shape, dtype)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "m.gguf").tensors}
    assert len(tensors) == 2 + 11 * shape.n_layer
    assert sum(int(t.n_elements) for t in tensors.values()) == parameter_count(shape)
    heads, heads_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    sizes = {
        "token_embd": [shape.n_embd, shape.n_vocab],
        "output_norm": [shape.n_embd],
        "blk.0.attn_q": [shape.n_embd, heads],
        "blk.0.attn_k": [shape.n_embd, heads_kv],
        "blk.0.attn_output": [heads, shape.n_embd],
        "blk.0.attn_k_norm": [shape.head_dim],
        "blk.0.ffn_down": [shape.n_ff, shape.n_embd],
    }
    assert {name: tensors[f"{name}.weight"].shape.tolist() for name in sizes} == sizes
    for name, tensor in tensors.items():
        is_norm = name.endswith("norm.weight")
        # No experts are here, and only experts are MXFP4.
        kind = GGMLQuantizationType.Q8_0 if dtype == "mxfp4" else TYPES[dtype][0]
        assert tensor.tensor_type == (GGMLQuantizationType.F32 if is_norm else kind)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_has_the_same_spread(dtype: str, tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "m.gguf", TINY, dtype)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "m.gguf").tensors}
    up = tensors["blk.1.ffn_up.weight"]
    weights = dequantize(up.data, up.tensor_type)
    assert weights.std() == pytest.approx(TINY.n_embd**-0.5, rel=0.02)
    assert abs(weights.mean()) < 0.02 * weights.std()
    embd = tensors["token_embd.weight"]
    rows = dequantize(embd.data, embd.tensor_type).std(axis=1)
    assert np.all(rows[-3:] < rows[ord("A")] / 2)


@pytest.mark.parametrize("dtype", ["q8_0", "mxfp4"])
def test_experts_have_the_same_spread(dtype: str, tmp_path: Path) -> None:
    shape = SHAPES["tiny-gpt-oss"]
    write_random_gguf(tmp_path / "m.gguf", shape, dtype)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "m.gguf").tensors}
    up = tensors["blk.1.ffn_up_exps.weight"]
    assert up.tensor_type == TYPES[dtype][0]
    weights = dequantize(up.data, up.tensor_type)
    assert weights.std() == pytest.approx(shape.n_embd**-0.5, rel=0.02)
    assert abs(weights.mean()) < 0.02 * weights.std()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_seed_decides_the_bytes(dtype: str, tmp_path: Path) -> None:
    contents = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.gguf"
        write_random_gguf(path, TINY, dtype, seed)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    assert len(contents[0]) == len(contents[2])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    monkeypatch.setattr("gguf.GGUFWriter.write_tensor_data", fail)
    with pytest.raises(OSError, match="disk full"):
        write_random_gguf(path, TINY, "f16")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_rejects_what_it_cannot_write(tmp_path: Path) -> None:
    small = ModelShape("small", 1, 64, 64, 2, 1, 32, 258, 128)
    with pytest.raises(ValueError, match="at least 259"):
        write_random_gguf(tmp_path / "m.gguf", small, "f16")
    with pytest.raises(ValueError, match="unknown type 'q3'"):
        write_random_gguf(tmp_path / "m.gguf", TINY, "q3")
    assert not list(tmp_path.iterdir())


def test_experts_are_matrices_of_their_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    sizes = (64, 32, 2, 1, 32, 512, 128)  # n_embd, n_ff, heads, of keys, of dimensions
    shape = ModelShape("m", 1, *sizes, "qwen3moe", n_expert=4, n_expert_used=2, is_tied=False)
    write_random_gguf(path, shape, "q8_0")
    reader = GGUFReader(path)
    assert value(reader, "qwen3moe.expert_count") == 4
    assert value(reader, "qwen3moe.expert_used_count") == 2
    assert value(reader, "qwen3moe.expert_feed_forward_length") == 32
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["output.weight"].shape.tolist() == [64, 512]
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type == GGMLQuantizationType.F32
    for name, columns_and_rows in (("gate", [64, 32]), ("up", [64, 32]), ("down", [32, 64])):
        experts = tensors[f"blk.0.ffn_{name}_exps.weight"]
        assert experts.shape.tolist() == [*columns_and_rows, 4]
        assert experts.tensor_type == GGMLQuantizationType.Q8_0
        weights = dequantize(experts.data, experts.tensor_type)
        assert np.std(weights) == pytest.approx(columns_and_rows[0] ** -0.5, rel=0.1)


def test_a_shape_can_be_cut_and_its_name_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    monkeypatch.setattr("sys.argv", ["model", str(path), "--shape", "tiny", "--layers", "1"])
    main()
    reader = GGUFReader(path)
    assert value(reader, "general.name") == "random-tiny-1-layers"
    assert value(reader, "qwen3.block_count") == 1
    monkeypatch.setattr("sys.argv", ["model", str(path), "--shape", "tiny", "--layers", "3"])
    with pytest.raises(SystemExit):
        main()
