"""Logits of random models beside llama.cpp's, and the refusal of models that OpenVINO cannot compute."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from serve_app.engine import EngineOptions
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.errors import ConfigError
from serve_app.llama.quantising import quantise
from tests.integration.openvino.random_models import Made
from tests.integration.store.sharded import split

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

import openvino

from serve_app.engine.backends.openvino import OpenVinoBackend
from serve_app.openvino.gguf_model import rounded, unreadable
from serve_app.openvino.paged import shifts
from tests.integration.openvino.bf16 import computes_bf16, with_bf16

_OPTIONS = EngineOptions(2, 256, 1, n_batch=128, profile_limit_s=0)
_BF16 = with_bf16(_OPTIONS)
_N_TOKENS, _N_SEEN = 100, 16
_LINEAR: dict[str, str | float] = {"type": "linear", "factor": 4.0}
_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "IQ4_NL", "IQ4_XS")
_K_FORMATS = ("Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K")


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


def ours(path: Path) -> NDArray[np.float32]:
    return logits(OpenVinoBackend(path, _OPTIONS))


def theirs(path: Path) -> NDArray[np.float32]:
    return logits(LlamaBackend(path, _OPTIONS))


def agreement(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The correlation of the two."""
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(Made("llama"), id="llama"),
        pytest.param(Made("llama", n_frequencies=32), id="llama-3.1"),
        pytest.param(Made("llama", n_frequencies=32, tied=True), id="llama-3.2"),
        pytest.param(Made("llama", biases=True), id="llama-biases"),
        pytest.param(Made("qwen2", biases=True), id="qwen2"),
        pytest.param(Made("qwen3", tied=True), id="qwen3-tied"),
        *(
            pytest.param(
                Made(name, biases=name == "qwen2", scaling={"type": kind, "factor": 4.0}),
                id=f"{name}-{kind}",
            )
            for name, kind in [("llama", "linear"), ("qwen2", "yarn"), ("qwen3", "none")]
        ),
        pytest.param(
            Made(
                "llama",
                scaling={"type": "yarn", "factor": 4.0, "attn_factor": 0.8},
                n_frequencies=32,
            ),
            id="llama-yarn",
        ),
    ],
)
def test_logits_are_llama_cpps(made: Made, tmp_path: Path) -> None:
    path = made.write(tmp_path / "model.gguf")
    assert unreadable([path]) is None
    assert agreement(ours(path), theirs(path)) > 0.9999


@computes_bf16
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_with_bf16_differs_by_rounding(name: str, tmp_path: Path) -> None:
    path = Made(name).write(tmp_path / "model.gguf")
    narrow = logits(OpenVinoBackend(path, _BF16))
    assert 0.999 < agreement(narrow, theirs(path)) < 0.999999
    assert agreement(narrow, logits(LlamaBackend(path, _BF16))) > 0.999


@computes_bf16
def test_a_state_with_bf16_is_restored_bit_by_bit_and_only_where_it_fits(tmp_path: Path) -> None:
    backend = OpenVinoBackend(Made("llama").write(tmp_path / "model.gguf"), _BF16)
    backend.decode([(token, token, 0, False) for token in range(_N_TOKENS)])
    backend.states.restore(1, backend.states.save(0))
    backend.decode([(7, _N_TOKENS, slot, True) for slot in (0, 1)])
    first, second = (backend._context.logits(i) for i in (0, 1))
    np.testing.assert_array_equal(first, second)
    other = OpenVinoBackend(backend.vocabulary.path, _OPTIONS)
    assert backend.states.key != other.states.key
    backend.close()
    other.close()


@computes_bf16
def test_shifted_keys_with_bf16_turn_as_others_do(tmp_path: Path) -> None:
    path = Made("qwen3").write(tmp_path / "model.gguf")
    found = []
    for options in (_BF16, _OPTIONS):
        backend = OpenVinoBackend(path, options)
        backend.decode([(5 + token, token, 0, False) for token in range(_N_TOKENS)])
        backend.shift(0, [(5, 3), (20, 30)])
        backend.decode([(7, _N_TOKENS - 33, 0, True)])
        found.append(backend._context.logits(0).copy())
        backend.close()
    assert agreement(*found) > 0.999


def test_a_processor_without_bf16_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    with pytest.raises(ConfigError, match=r"cache_type_v: bf16 needs a processor"):
        OpenVinoBackend(Made("llama").write(tmp_path / "model.gguf"), _BF16)
    assert not (tmp_path / "cache").exists(), "nothing was converted for it"


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("llama", [(10, 40)]),
        ("llama", [(0, 32)]),
        ("qwen3", [(5, 3), (20, 30)]),
        ("qwen3", [(64, 8)]),
    ],
)
def test_shifted_keys_turn_to_their_new_places(
    name: str, cuts: list[tuple[int, int]], tmp_path: Path
) -> None:
    n_frequencies, scaling = (32 if name == "llama" else 0), _LINEAR
    made = Made(name, n_frequencies=n_frequencies, scaling=scaling)
    path = made.write(tmp_path / "model.gguf")
    text = [int(token) for token in np.random.default_rng(5).integers(5, 500, _N_TOKENS)]
    found = []
    for kind in (OpenVinoBackend, LlamaBackend):
        backend = kind(path, _OPTIONS)
        backend.decode([(token, i, 0, False) for i, token in enumerate(text)])
        backend.copy(0, 1)  # whose blocks are the same, and must stay
        backend.shift(0, cuts)
        n_past = _N_TOKENS - sum(n for _, n in cuts)
        backend.decode([(7, n_past, 0, True), (7, _N_TOKENS, 1, True)])
        found.append(np.stack([backend._context.logits(i).copy() for i in (0, 1)]))
        backend.close()
    shifted, untouched = zip(*found, strict=True)
    assert agreement(*shifted) > 0.9999
    assert agreement(*untouched) > 0.9999
    assert agreement(shifted[0], untouched[0]) < 0.999


def test_a_shift_with_yarn_is_as_if_the_tokens_had_stood_there(tmp_path: Path) -> None:
    """llama.cpp scales all keys once more here: it is no reference."""
    scaling: dict[str, str | float] = {"type": "yarn", "factor": 4.0}
    path = Made("qwen3", scaling=scaling).write(tmp_path / "model.gguf")
    text = [int(token) for token in np.random.default_rng(5).integers(5, 500, _N_TOKENS)]
    backend = OpenVinoBackend(path, _OPTIONS)
    backend.decode([(token, i, 0, False) for i, token in enumerate(text)])
    backend.decode([(token, i, 1, False) for i, token in enumerate(text[40:])])
    backend.shift(0, [(0, 40)])
    # Keys of the first layer depend on their own token only.
    first = {
        name: [shifts.cells_of(cache[backend._context._tables.blocks(slot)]) for slot in (0, 1)]
        for name, cache in backend._context._caches.items()
        if name in ("key_cache.0", "value_cache.0")
    }
    backend.close()
    for shifted, computed in first.values():
        np.testing.assert_allclose(shifted[:60], computed[:60], rtol=0, atol=0.01)


@pytest.mark.parametrize("name", _FORMATS + _K_FORMATS)
def test_formats_are_read_as_exactly_as_by_llama_cpp(name: str, tmp_path: Path) -> None:
    plain = Made("llama").write(tmp_path / "plain.gguf")
    path, unpacked = tmp_path / "model.gguf", tmp_path / "unpacked.gguf"
    quantise(plain, path, name)
    quantise(path, unpacked, "F32")
    exact, found, other = theirs(unpacked), ours(path), theirs(path)
    assert agreement(found, exact) > 0.9985
    assert agreement(found, exact) > agreement(other, exact) - 0.0005


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    path = Made("qwen3", Kind.Q8_0).write(tmp_path / "model.gguf")
    first, *_ = split(path, tmp_path / "parts", 3)
    assert (ours(first) == ours(path)).all()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        pytest.param(Made("phi2"), "the architecture phi2", id="architecture"),
        pytest.param(
            Made("llama", stranger="blk.0.ffn_sub_norm.weight"), "ffn_sub_norm", id="tensor"
        ),
        pytest.param(Made("llama", scaling={"type": "longrope"}), "longrope", id="scaling"),
    ],
)
def test_what_it_cannot_compute_is_refused(made: Made, reason: str, tmp_path: Path) -> None:
    found = unreadable([made.write(tmp_path / "model.gguf")])
    assert found is not None
    assert reason in found


def test_the_refusal_names_the_file_and_the_other_backend(tmp_path: Path) -> None:
    path = Made("qwen3", stranger="blk.1.more.weight").write(tmp_path / "strange.gguf")
    with pytest.raises(ConfigError, match=r"strange\.gguf: its tensor blk\.1\.more.*llama\.cpp"):
        OpenVinoBackend(path, _OPTIONS)


def test_formats_that_are_rounded_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = Made("llama", Kind.Q8_0).write(tmp_path / "exact.gguf")
    path = tmp_path / "model.gguf"
    quantise(exact, path, "Q6_K")
    assert rounded([exact]) == []
    assert rounded([path]) == ["Q6_K"]
    with caplog.at_level(logging.INFO, "corral.engine"):
        OpenVinoBackend(path, _OPTIONS).close()
    assert "Q6_K weights with 8 bits" in caplog.text
