"""Sizes and rotary embeddings by config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from serve_app.errors import ConfigError
from serve_app.openvino.exported.hyperparameters import Hyperparameters

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 500,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def of(**more: object) -> Hyperparameters:
    return Hyperparameters.of(CONFIG | more)


def test_sizes_are_read() -> None:
    found = of(num_key_value_heads=None, tie_word_embeddings=True)
    assert (found.architecture, found.n_head_kv, found.rotary.head_size) == ("qwen2", 4, 16)
    assert of(head_dim=32).rotary.head_size == 32
    assert of(model_type="mistral").architecture == "llama"
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert found.n_params == matrices + 500 * 64
    assert of(num_key_value_heads=4).n_params == matrices + 2 * 500 * 64


def test_old_and_new_ways_to_write_the_base_are_known() -> None:
    assert of().rotary.base == 5e5
    new = {"rope_type": "default", "rope_theta": 1e6}
    assert of(rope_parameters=new, rope_theta=None).rotary.base == 1e6


def test_llama_3_divides_slow_frequencies() -> None:
    found = of(rope_scaling={"rope_type": "llama3", **LLAMA_3})
    plain = of().frequencies
    assert found.factors is not None
    turns = 1024 * plain / (2 * math.pi)
    assert (found.factors[turns > 4] == 1).all()
    np.testing.assert_allclose(found.factors[turns < 1], 8, rtol=1e-6)
    between = found.factors[(turns > 1) & (turns < 4)]
    assert ((between > 1) & (between < 8)).all()
    np.testing.assert_allclose(found.frequencies, plain / found.factors, rtol=1e-6)


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_linear_and_yarn_scale(name: str) -> None:
    linear = of(rope_scaling={name: "linear", "factor": 4.0})
    np.testing.assert_allclose(linear.frequencies, of().frequencies / 4, rtol=1e-6)
    scaling = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    rotary = of(rope_scaling=scaling).rotary
    assert (rotary.scaling, rotary.factor, rotary.n_ctx_train) == ("yarn", 4.0, 2048)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model_type": "phi3"}, "the architecture phi3 is not known"),
        ({"model_type": None}, "the architecture None"),
        ({"hidden_size": None}, "hidden_size in its config.json is not a size: None"),
        ({"num_attention_heads": 0}, "num_attention_heads .* is not a size: 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* is not a size: True"),
        ({"head_dim": 10**9}, "head_dim .* is not a size"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads .* is not a size: 2"),
        ({"rope_scaling": {"type": "longrope"}}, "scaled as longrope"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}}, "beta_fast: 16"),
        ({"partial_rotary_factor": 0.5}, "only a part of its heads"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    ],
)
def test_what_is_not_known_is_refused_by_name(more: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        of(**more)


def test_a_window_that_is_not_used_is_none() -> None:
    assert of(sliding_window=4096, use_sliding_window=False).n_layer == 2


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": []},
        {"rms_norm_eps": None},
        {"layer_types": 1},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    ],
)
def test_another_form_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"its config\.json is not as an exporter writes it \(\w+: "
    ):
        of(**more)
