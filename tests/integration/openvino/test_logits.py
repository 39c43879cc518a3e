"""Logits of random models beside llama.cpp's, and the refusal of models that OpenVINO cannot compute."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError
from serve_app.engine import EngineOptions
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.quantising import quantise
from tests.integration.openvino.random_models import Made
from tests.integration.store.sharded import split

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

import openvino

from serve_app.engine.backends import openvino as openvino_backend
from serve_app.engine.backends.openvino import OpenVinoBackend
from serve_app.engine.choice.plan import OPENVINO_PLAN, OPENVINO_W8A8, Plan
from serve_app.kernels.openvino import convert, graph, weights
from serve_app.kernels.openvino.architectures import ARCHITECTURES
from serve_app.kernels.openvino.gguf_model import readable
from serve_app.kernels.openvino.graph import build
from serve_app.kernels.openvino.paged import shifts
from serve_app.kernels.openvino.paged.blocks import BLOCK
from serve_app.kernels.openvino.paged.model import PagedModel
from serve_app.kernels.openvino.weights import GROUP
from tests.integration.openvino.bf16 import COMPUTES_BF16, computes_bf16, with_bf16

_OPTIONS = EngineOptions(2, 256, 1, n_batch=128, profile_limit_s=0)
_BF16 = with_bf16(_OPTIONS)
_U8 = replace(_OPTIONS, cache_type_k="q8_0", cache_type_v="q8_0")
_N_TOKENS, _N_SEEN = 100, 16
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
_WINDOW = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False]}
_GRANITE = {
    "logit_scale": 8.0,
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "attention.scale": 0.1,
}
_MINISTRAL = _YARN | {
    "attention.temperature_scale": 0.3,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
}
_LONGROPE = {
    "rope.scaling.type": "longrope",
    "rope.scaling.attn_factor": 1.2,
    "rope.dimension_count": 48,
}
_FACTORS = {"rope_factors_short.weight": (24, 2.0), "rope_factors_long.weight": (24, 6.0)}
_FREQUENCIES = {"rope_freqs.weight": (32, 4.0)}
_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "IQ4_NL", "IQ4_XS")
_K_FORMATS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    """Where converted models are kept. This process converts them, which saves a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setattr(
            convert,
            "_convert",
            lambda files, folder, lock, report, *of: convert.main(folder, files, *of),
        )
        yield


def caches(backend: OpenVinoBackend) -> Mapping[str, NDArray[Any]]:
    layers = backend._context.layers
    assert isinstance(layers, PagedModel)
    return layers.caches


def logits(backend: LlamaBackend | OpenVinoBackend) -> NDArray[np.float32]:
    """Of the last tokens of a random text."""
    text, seen = np.random.default_rng(5).integers(5, 500, _N_TOKENS), _N_TOKENS - _N_SEEN
    try:
        backend.decode([(int(token), i, 0, i >= seen) for i, token in enumerate(text)])
        found = [backend._context.logits(i).copy() for i in range(seen, _N_TOKENS)]
    finally:
        backend.close()
    return np.stack(found)


def mixed(backend: LlamaBackend | OpenVinoBackend) -> NDArray[np.float32]:
    """The logits of all tokens but the first ones of two random texts, a long one alone, and then both."""
    first, second = np.random.default_rng(5).integers(5, 500, (2, _N_TOKENS))
    n_alone = BLOCK - 1  # the rows after it are in two blocks
    batches = [
        [(int(token), i, 0, True) for i, token in enumerate(first[:n_alone])],
        [
            *((int(first[n_alone + i]), n_alone + i, 0, True) for i in range(3)),
            *((int(token), i, 1, True) for i, token in enumerate(second[:40])),
        ],
        [(int(first[-1]), n_alone + 3, 0, True), (int(second[-1]), 40, 1, True)],
    ]
    found = []
    try:
        for batch in batches:
            backend.decode(batch)
            found += [backend._context.logits(i).copy() for i in range(len(batch))]
    finally:
        backend.close()
    return np.stack(found)


def opened(path: Path, options: EngineOptions = _OPTIONS) -> OpenVinoBackend:
    return OpenVinoBackend(Model(path, vocab_only=True), options)


def ours(path: Path) -> NDArray[np.float32]:
    return logits(opened(path))


def theirs(path: Path) -> NDArray[np.float32]:
    return logits(LlamaBackend(path, _OPTIONS))


def agreement(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The correlation of the two."""
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


MODELS = {
    "llama": Made("llama"),
    "llama-3.1": Made("llama", vectors=_FREQUENCIES),
    "llama-3.2": Made("llama", vectors=_FREQUENCIES, tied=True),
    "llama-biases": Made("llama", biases=True),
    "llama-linear": Made("llama", metadata=_LINEAR),
    "llama-yarn": Made(
        "llama", metadata=_YARN | {"rope.scaling.attn_factor": 0.8}, vectors=_FREQUENCIES
    ),
    "mistral3": Made("mistral3"),
    "mistral3-temperature": Made("mistral3", metadata=_MINISTRAL),
    "granite": Made("granite", metadata=_GRANITE, tied=True),
    "smollm3": Made("smollm3", n_layer=4),
    "qwen2": Made("qwen2", biases=True),
    "qwen2-yarn": Made("qwen2", biases=True, metadata=_YARN),
    "qwen3-tied": Made("qwen3", tied=True),
    "qwen3-none": Made("qwen3", metadata=_YARN | {"rope.scaling.type": "none"}),
    "qwen2moe": Made("qwen2moe", biases=True),
    "qwen3moe": Made("qwen3moe"),
    "gpt-oss": Made("gpt-oss", biases=True, metadata=_YARN | {"attention.sliding_window": 24}),
    "gpt-oss-mxfp4": Made(
        "gpt-oss", Kind.MXFP4, biases=True, metadata={"attention.sliding_window": 24}
    ),
    "phi3": Made("phi3", one_qkv=True),
    "phi3-short": Made(
        "phi3",
        one_qkv=True,
        metadata=_LONGROPE | {"rope.scaling.original_context_length": 256},
        vectors=_FACTORS,
    ),
    "phi3-long": Made(
        "phi3",
        one_qkv=True,
        metadata=_LONGROPE | {"rope.scaling.original_context_length": 128},
        vectors=_FACTORS,
    ),
    "glm4": Made("glm4", biases=True, metadata={"rope.dimension_count": 32}),
    "gemma3": Made("gemma3", tied=True, metadata=_WINDOW | _LINEAR),
    "gemma3-cap": Made("gemma3", metadata={"final_logit_softcapping": 2.0}),
    "olmo2": Made("olmo2", wide_norms=True),
    "olmo3": Made("olmo2", wide_norms=True, metadata=_WINDOW | _YARN),
    "exaone4": Made("exaone4", tied=True, vectors=_FREQUENCIES),
}


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_logits_are_llama_cpps(made: Made, tmp_path: Path) -> None:
    path = made.write(tmp_path / "model.gguf")
    assert readable([path]).architecture == made.architecture
    found, other = (mixed(kind(path, _OPTIONS)) for kind in (opened, LlamaBackend))
    # A rounded score may choose another expert.
    has_experts = ARCHITECTURES[made.architecture].experts
    assert agreement(found, other) > (0.999 if has_experts else 0.9999)
    least_same = 0.97 if made.kind is Kind.F16 else 0.94  # both quantise activations otherwise
    assert (found.argmax(axis=1) == other.argmax(axis=1)).mean() > least_same


def test_a_state_of_a_longer_context_fits_only_where_positions_turn_alike(tmp_path: Path) -> None:
    path = MODELS["phi3-long"].write(tmp_path / "model.gguf")
    keys = []
    for n_ctx_slot in (64, 128, 256):
        backend = opened(path, replace(_OPTIONS, n_ctx_slot=n_ctx_slot))
        keys.append(backend.states.key)
        backend.close()
    assert keys[0] == keys[1] != keys[2]


def test_there_is_a_model_of_each_decoder() -> None:
    decoders = {name for name, kind in ARCHITECTURES.items() if not kind.encodes}
    assert {made.architecture for made in MODELS.values()} == decoders


_narrow_caches = pytest.mark.parametrize(
    "narrow", [pytest.param(_BF16, marks=computes_bf16, id="bf16"), pytest.param(_U8, id="q8_0")]
)


@_narrow_caches
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_to_a_narrow_cache_differs_by_rounding(
    name: str, narrow: EngineOptions, tmp_path: Path
) -> None:
    path = Made(name).write(tmp_path / "model.gguf")
    rounded_logits = logits(opened(path, narrow))
    assert 0.999 < agreement(rounded_logits, theirs(path)) < 0.999999
    assert agreement(rounded_logits, logits(LlamaBackend(path, narrow))) > 0.999


@_narrow_caches
def test_a_state_of_a_narrow_cache_is_restored_bit_by_bit_and_only_where_it_fits(
    narrow: EngineOptions, tmp_path: Path
) -> None:
    """Also where another sequence had the block before, and tokens follow that others do not have."""
    backend = opened(Made("llama").write(tmp_path / "model.gguf"), narrow)
    backend.decode([(token, token, 0, False) for token in range(_N_TOKENS)])
    state = backend.states.save(0)
    backend.copy(0, 1)
    backend.decode([(9, _N_TOKENS, 0, False)])
    backend.truncate(0, 0)
    backend.states.restore(0, state)
    backend.decode([(7, _N_TOKENS, slot, True) for slot in (0, 1)])
    first, second = (backend._context.logits(i) for i in (0, 1))
    np.testing.assert_array_equal(first, second)
    other = opened(backend.vocabulary.path)
    assert backend.states.key != other.states.key
    backend.close()
    other.close()


@_narrow_caches
def test_shifted_keys_of_a_narrow_cache_turn_as_others_do(
    narrow: EngineOptions, tmp_path: Path
) -> None:
    path = Made("qwen3").write(tmp_path / "model.gguf")
    found = []
    for options in (narrow, _OPTIONS):
        backend = opened(path, options)
        backend.decode([(5 + token, token, 0, False) for token in range(_N_TOKENS)])
        backend.shift(0, [(5, 3), (20, 30)])
        backend.decode([(7, _N_TOKENS - 33, 0, True)])
        found.append(backend._context.logits(0).copy())
        backend.close()
    assert agreement(*found) > 0.999


def test_a_processor_without_bf16_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    with pytest.raises(ConfigError, match=r"cache_type_v: bf16 needs a processor"):
        opened(Made("llama").write(tmp_path / "model.gguf"), _BF16)
    assert not (tmp_path / "cache").exists(), "nothing was converted for it"


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("llama", [(10, 40)]),
        ("llama", [(0, 32)]),
        ("qwen3", [(5, 3), (20, 30)]),
        ("qwen3", [(64, 8)]),
        ("gemma3", [(5, 30)]),
    ],
)
def test_shifted_keys_turn_to_their_new_places(
    name: str, cuts: list[tuple[int, int]], tmp_path: Path
) -> None:
    more = {"llama": Made(name, vectors=_FREQUENCIES), "gemma3": Made(name, metadata=_WINDOW)}
    made = more.get(name, Made(name, metadata=_LINEAR))
    path = made.write(tmp_path / "model.gguf")
    text = [int(token) for token in np.random.default_rng(5).integers(5, 500, _N_TOKENS)]
    found = []
    for kind in (opened, LlamaBackend):
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
    path = Made("qwen3", metadata=_YARN).write(tmp_path / "model.gguf")
    text = [int(token) for token in np.random.default_rng(5).integers(5, 500, _N_TOKENS)]
    backend = opened(path)
    backend.decode([(token, i, 0, False) for i, token in enumerate(text)])
    backend.decode([(token, i, 1, False) for i, token in enumerate(text[40:])])
    backend.shift(0, [(0, 40)])
    # Keys of the first layer depend on their own token only.
    first = {
        name: [shifts.cells_of(cache[backend._context._tables.blocks(slot)]) for slot in (0, 1)]
        for name, cache in caches(backend).items()
        if name in ("key_cache.0", "value_cache.0")
    }
    backend.close()
    for shifted, computed in first.values():
        np.testing.assert_allclose(shifted[:60], computed[:60], rtol=0, atol=0.01)


def test_a_shift_leaves_keys_alone_that_have_no_positions(tmp_path: Path) -> None:
    """llama.cpp turns them, too: it is no reference."""
    path = Made("smollm3", n_layer=4).write(tmp_path / "model.gguf")
    backend = opened(path)
    backend.decode([(5 + token, token, 0, False) for token in range(_N_TOKENS)])

    def keys(layer: int) -> NDArray[np.float16]:
        context = backend._context
        cache = caches(backend)[f"key_cache.{layer}"]
        return shifts.cells_of(cache[context._tables.blocks(0)])

    before = keys(2), keys(3)
    backend.shift(0, [(5, 30)])
    kept = np.delete(np.arange(_N_TOKENS), slice(5, 35))
    np.testing.assert_array_equal(keys(3)[: len(kept)], before[1][kept])
    assert not np.array_equal(keys(2)[: len(kept)], before[0][kept])
    backend.close()


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
            Made("llama", vectors={"blk.0.ffn_sub_norm.weight": (256, 1.0)}),
            "ffn_sub_norm",
            id="tensor",
        ),
        pytest.param(Made("llama", metadata={"rope.scaling.type": "xpos"}), "xpos", id="scaling"),
    ],
)
def test_what_it_cannot_compute_is_refused(made: Made, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        readable([made.write(tmp_path / "model.gguf")])


def test_the_refusal_names_the_file_and_the_other_backend(tmp_path: Path) -> None:
    path = Made("llama", vectors={"blk.1.attn_q.scale": (1, 1.0)}).write(tmp_path / "strange.gguf")
    with pytest.raises(
        ConfigError, match=r"strange\.gguf: its tensor blk\.1\.attn_q\.scale.*llama"
    ):
        opened(path)


def test_formats_that_are_rounded_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = Made("llama", Kind.Q8_0).write(tmp_path / "exact.gguf")
    path = tmp_path / "model.gguf"
    quantise(exact, path, "Q6_K")
    assert readable([exact]).rounded_formats == []
    assert readable([path]).rounded_formats == ["Q6_K"]
    with caplog.at_level(logging.INFO, "corral.engine"):
        opened(path).close()
    assert "Q6_K weights with 8 bits" in caplog.text


@pytest.mark.parametrize(
    ("name", "n_products"), [("qwen2moe", 3), ("qwen3moe", 3), ("gpt-oss", 2), ("gpt-oss-mxfp4", 2)]
)
def test_only_experts_that_were_chosen_are_computed(
    tmp_path: Path, name: str, n_products: int
) -> None:
    graph = build([MODELS[name].write(tmp_path / "model.gguf")], lambda _: None)
    compiled = openvino.Core().compile_model(graph, "CPU")
    nodes = compiled.get_runtime_model().get_ordered_ops()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in nodes]
    assert kinds.count("GatherMatmul") == n_products * MODELS[name].n_layer


_W8A8 = replace(_OPTIONS, backend="openvino", quantization="w8a8")


@pytest.mark.parametrize(
    ("name", "least"), [("qwen3-tied", 0.998), ("llama-biases", 0.999), ("qwen3moe", 0.98)]
)
def test_eight_bits_for_longer_groups_are_nearly_as_exact(
    name: str, least: float, tmp_path: Path
) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    rounded = opened(path, _W8A8)
    layers = rounded._context.layers
    assert isinstance(layers, PagedModel)
    assert layers._requests
    compiled = layers._requests[0][0].get_compiled_model()
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 128
    assert least < agreement(logits(rounded), theirs(path)) < 0.999999


@computes_bf16
def test_eight_bits_have_attention_with_bf16_where_the_processor_has_such_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Made("llama").write(tmp_path / "model.gguf")
    backends = [opened(path, _W8A8)]
    monkeypatch.setattr(openvino_backend, "computes_bf16", lambda: False)
    backends.append(opened(path, _W8A8))
    kinds = []
    for backend in backends:
        assert isinstance(backend._context.layers, PagedModel)
        kinds.append({cache.dtype for cache in backend._context.layers.caches.values()})
    assert kinds == [{shifts.BF16}, {np.dtype(np.float16)}]
    assert backends[0].states.key != backends[1].states.key
    found = [logits(backend) for backend in backends]
    assert 0.999 < agreement(*found) < 0.999999


def test_few_rows_have_the_files_weights_where_the_plan_says_so(tmp_path: Path) -> None:
    """They share the cache with `w8a8`, which computes the others, and all texts to embed."""
    path = MODELS["llama"].write(tmp_path / "model.gguf")
    model, n_few = Model(path, vocab_only=True), 8
    both_ways = Plan(replace(OPENVINO_W8A8, many_from=n_few + 1))
    exact_options = _BF16 if COMPUTES_BF16 else _OPTIONS
    both, rounded, exact = (
        OpenVinoBackend(model, options, plan=plan)
        for options, plan in (
            (_W8A8, both_ways),
            (_W8A8, Plan(OPENVINO_W8A8)),
            (exact_options, OPENVINO_PLAN),
        )
    )
    try:
        for n_rows, same, other in ((n_few, exact, rounded), (n_few + 1, rounded, exact)):
            found = {backend: last_logits(backend, 0, n_rows) for backend in (both, same, other)}
            assert np.array_equal(found[both], found[same])
            assert not np.array_equal(found[both], found[other])
        behind = {backend: last_logits(backend, n_few + 1, 1) for backend in (both, rounded)}
        assert agreement(behind[both], behind[rounded]) > 0.998
        rows = [(5 + i, i, 1, True) for i in range(n_few)]
        assert np.array_equal(both.embeddings.embed(rows), rounded.embeddings.embed(rows))
    finally:
        for backend in (both, rounded, exact):
            backend.close()


def last_logits(backend: OpenVinoBackend, first: int, n_rows: int) -> NDArray[np.float32]:
    """The logits of the last of so many tokens from that position on."""
    backend.truncate(0, first)
    backend.decode([(7 + i, first + i, 0, i == n_rows - 1) for i in range(n_rows)])
    return backend._context.logits(n_rows - 1).copy()


def test_products_of_the_same_values_turn_them_once(tmp_path: Path) -> None:
    made = MODELS["llama"]
    path = made.write(tmp_path / "model.gguf")
    graph = build([path], lambda _: None, quantization="w8a8")
    nodes = openvino.Core().compile_model(graph, "CPU").get_runtime_model().get_ordered_ops()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in nodes]
    n_products, n_turns = 5, 4  # gate and up are two products of the same values
    assert kinds.count("FullyConnected") == made.n_layer * (n_products + n_turns) + 2


def test_activations_with_outliers_are_turned_before_they_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Made("llama", outlier=30.0, n_layer=1).write(tmp_path / "model.gguf")
    exact = theirs(path)
    turned = agreement(logits(opened(path, _W8A8)), exact)
    for module in (weights, graph):
        monkeypatch.setattr(module, "HADAMARD", np.eye(GROUP, dtype=np.float32))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unturned"))
    unturned = agreement(logits(opened(path, _W8A8)), exact)
    assert 1 - turned < (1 - unturned) / 3
