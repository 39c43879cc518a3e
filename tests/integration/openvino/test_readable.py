"""Logits of random models beside llama.cpp's, and the refusal of what OpenVINO would compute wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from serve_app.demo_model.gguf_file import ModelShape, add_hyperparameters, add_tokenizer
from serve_app.demo_model.random_gguf import vocabulary
from serve_app.engine import EngineOptions
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.errors import ConfigError
from serve_app.openvino.readable import inexact, misread

pytest.importorskip("openvino_genai", reason="corral[openvino] is not installed")

from serve_app.engine.backends.openvino import OpenVinoBackend

_OPTIONS = EngineOptions(2, 256, 1, n_batch=128, profile_limit_s=0)
_FILE_TYPES = {
    Kind.F16: LlamaFileType.MOSTLY_F16,
    Kind.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    Kind.Q4_1: LlamaFileType.MOSTLY_Q4_1,
    Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}
_SHAPE = ModelShape("random", 2, 256, 512, 4, 2, 64, 512, 4096)
_N_TOKENS, _N_SEEN = 100, 16


@dataclass(frozen=True, slots=True)
class Made:
    """A model with random weights."""

    architecture: str
    kind: Kind = Kind.F16
    biases: bool = False
    tied: bool = False
    n_frequencies: int = 0
    scaling: dict[str, str | float] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        tokens, merges = vocabulary(_SHAPE.n_vocab)
        writer, rng = GGUFWriter(path, self.architecture), np.random.default_rng(1)
        add_hyperparameters(writer, _SHAPE, _FILE_TYPES[self.kind], rope_base=1e4)
        for key, value in self.scaling.items():
            name = f"{self.architecture}.rope.scaling.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_float32(name, value)
        add_tokenizer(writer, tokens, merges)

        def matrix(name: str, rows: int, columns: int) -> None:
            values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
            kept = gguf.quants.quantize(values, self.kind)
            writer.add_tensor(name, kept, raw_dtype=self.kind)

        def vector(name: str, n: int, mean: float = 1.0) -> None:
            writer.add_tensor(name, rng.normal(mean, 0.2, n).astype(np.float32))

        n_embd, n_ff, head = _SHAPE.n_embd, _SHAPE.n_ff, _SHAPE.head_dim
        heads = {"q": _SHAPE.n_head * head, "k": _SHAPE.n_head_kv * head}
        heads["v"] = heads["k"]
        matrix("token_embd.weight", len(tokens), n_embd)
        vector("output_norm.weight", n_embd)
        if not self.tied:
            matrix("output.weight", len(tokens), n_embd)
        if self.n_frequencies:
            vector("rope_freqs.weight", self.n_frequencies, 4.0)
        for layer in range(_SHAPE.n_layer):
            block = f"blk.{layer}."
            vector(f"{block}attn_norm.weight", n_embd)
            vector(f"{block}ffn_norm.weight", n_embd)
            for name, rows in heads.items():
                matrix(f"{block}attn_{name}.weight", rows, n_embd)
                if self.biases:
                    vector(f"{block}attn_{name}.bias", rows, 0.0)
            matrix(f"{block}attn_output.weight", n_embd, heads["q"])
            for name in ("gate", "up"):
                matrix(f"{block}ffn_{name}.weight", n_ff, n_embd)
            matrix(f"{block}ffn_down.weight", n_embd, n_ff)
            if self.architecture == "qwen3":
                vector(f"{block}attn_q_norm.weight", head, 1.5)
                vector(f"{block}attn_k_norm.weight", head, 1.5)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    """Where converted models are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield


def logits(backend: LlamaBackend | OpenVinoBackend) -> NDArray[np.float32]:
    """Of the last tokens of a random text."""
    text, seen = np.random.default_rng(5).integers(5, 500, _N_TOKENS), _N_TOKENS - _N_SEEN
    try:
        backend.decode([(int(token), i, 0, i >= seen) for i, token in enumerate(text)])
        found = [backend._context.logits(i).copy() for i in range(seen, _N_TOKENS)]
    finally:
        backend.close()
    return np.stack(found)


def agreement(path: Path) -> float:
    """The correlation of both backends' logits."""
    ours, theirs = OpenVinoBackend(path, _OPTIONS), LlamaBackend(path, _OPTIONS)
    return float(np.corrcoef(logits(ours).ravel(), logits(theirs).ravel())[0, 1])


@pytest.mark.long
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(Made("llama"), id="llama"),
        pytest.param(Made("llama", Kind.Q4_0, tied=True), id="llama-q4_0-tied"),
        pytest.param(Made("llama", Kind.Q8_0), id="llama-q8_0"),
        pytest.param(Made("qwen2", biases=True), id="qwen2"),
        pytest.param(Made("qwen2", Kind.Q4_0, biases=True, tied=True), id="qwen2-q4_0-tied"),
        pytest.param(Made("qwen3", Kind.Q4_0), id="qwen3-q4_0"),
        pytest.param(Made("qwen3", Kind.Q8_0, tied=True), id="qwen3-q8_0-tied"),
        pytest.param(Made("llama", scaling={"type": "none", "factor": 4.0}), id="scaled-by-none"),
        pytest.param(Made("qwen3", scaling={"type": "linear", "factor": 1.0}), id="scaled-by-1"),
    ],
)
def test_logits_are_llama_cpps(made: Made, tmp_path: Path) -> None:
    path = made.write(tmp_path / "model.gguf")
    assert misread(path) == []
    assert agreement(path) > 0.999


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        pytest.param(Made("llama", n_frequencies=32), "Llama 3.1", id="frequencies"),
        pytest.param(Made("llama", biases=True), "biases of queries", id="biases"),
        *(
            pytest.param(
                Made(name, biases=name == "qwen2", scaling={"type": kind, "factor": 4.0}),
                "a scaled rotary embedding",
                id=f"{name}-{kind}",
            )
            for name in ("llama", "qwen2", "qwen3")
            for kind in ("linear", "yarn")
        ),
    ],
)
def test_what_the_reader_would_ignore_is_refused(
    made: Made, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.write(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=rf"{reason}.*llama\.cpp"):
        OpenVinoBackend(path, _OPTIONS)
    monkeypatch.setattr("serve_app.openvino.convert.misread", lambda _: [])
    assert agreement(path) < 0.99  # else there would be no reason to refuse it


def test_formats_that_it_rounds_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = Made("llama", Kind.Q8_0).write(tmp_path / "exact.gguf")
    rounded = Made("llama", Kind.Q4_1).write(tmp_path / "rounded.gguf")
    assert inexact(exact) == []
    assert inexact(rounded) == ["Q4_1"]
    with caplog.at_level(logging.WARNING, "corral.engine"):
        assert agreement(rounded) < 0.99
    assert "rounds the offsets of Q4_1" in caplog.text
