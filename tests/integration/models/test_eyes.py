"""The built-in model's eyes: what is trained is what llama.cpp computes."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.values.media import Picture
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.vision.positions import Tile
from serve_app.kernels.llama.vision.projector import MtmdProjector
from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.builtin_model.pictures.drawing import draw, fitted
from tools.builtin_model.pictures.export import Weights, write_gguf
from tools.builtin_model.pictures.scenes import scene
from tools.builtin_model.pictures.shape import NORM_EPS, EyesShape

Image = pytest.importorskip("PIL.Image")

Array = NDArray[Any]

SHAPE = EyesShape(2, 64, 96, 4, 48, 6, 96, 256)


def random_weights(shape: EyesShape) -> Weights:
    """Weights by `network.Eyes`' names for them, which half precision holds exactly."""
    rng = np.random.default_rng(0)

    def made(*sizes: int, mean: float = 0.0) -> Array:
        scale = 1 / np.prod(sizes[1:]) ** 0.5 if len(sizes) > 1 else 0.1
        return (mean + scale * rng.standard_normal(sizes)).astype(np.float16).astype(np.float32)

    width, wide, merged = shape.n_embd, shape.n_ff, shape.n_embd * shape.n_merge**2
    weights = {
        "patches.weight": made(width, 3, shape.patch_size, shape.patch_size),
        "patches.bias": made(width),
        "positions": made(shape.n_side**2, width),
        "register": made(1, width),
        "merged_norm.weight": made(merged, mean=1),
        "hidden.weight": made(shape.n_hidden, merged),
        "output.weight": made(shape.n_out, shape.n_hidden),
    }
    norms = ["norm"]
    for layer in (f"layers.{number}" for number in range(shape.n_layer)):
        norms += [f"{layer}.ln1", f"{layer}.ln2"]
        for part, rows, columns in (
            ("qkv", 3 * width, width),
            ("out", width, width),
            ("up", wide, width),
            ("down", width, wide),
        ):
            weights[f"{layer}.{part}.weight"] = made(rows, columns)
            weights[f"{layer}.{part}.bias"] = made(rows)
    for norm in norms:
        weights[f"{norm}.weight"], weights[f"{norm}.bias"] = made(width, mean=1), made(width)
    return weights


def embeddings(shape: EyesShape, weights: Weights, pixels: NDArray[np.uint8]) -> Array:
    """What the eyes make of a square picture, by plain arithmetic."""

    def linear(name: str, x: Array) -> Array:
        y: Array = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def normed(name: str, x: Array) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + NORM_EPS)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name: str, x: Array) -> Array:
        parts = linear(f"{name}.qkv", x).reshape(len(x), 3, shape.n_head, -1).transpose(1, 2, 0, 3)
        scores = parts[0] @ parts[1].transpose(0, 2, 1) / parts.shape[-1] ** 0.5
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        seen = chances / chances.sum(-1, keepdims=True) @ parts[2]
        return linear(f"{name}.out", seen.transpose(1, 0, 2).reshape(x.shape))

    side, patch, merge = shape.n_side, shape.patch_size, shape.n_merge
    image = (pixels.astype(np.float32) / 127.5 - 1).reshape(side, patch, side, patch, 3)
    patches = image.transpose(0, 2, 4, 1, 3).reshape(side * side, -1)
    x = patches @ weights["patches.weight"].reshape(shape.n_embd, -1).T + weights["patches.bias"]
    x = np.concatenate([weights["register"], x + weights["positions"]])
    for name in (f"layers.{number}" for number in range(shape.n_layer)):
        x = x + attention(name, normed(f"{name}.ln1", x))
        up = linear(f"{name}.up", normed(f"{name}.ln2", x))
        gelu = up * (1 + np.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up**3))) / 2
        x = x + linear(f"{name}.down", gelu)
    x = normed("norm", x)[1:].reshape(side // merge, merge, side // merge, merge, -1)
    x = x.transpose(0, 2, 1, 3, 4).reshape(shape.n_tokens, -1)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS) * weights["merged_norm.weight"]
    return linear("output", np.maximum(linear("hidden", x), 0) ** 2)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(BUILTIN_MODEL)


@pytest.mark.parametrize("side", [48, 30, 200])
@pytest.mark.parametrize("seed", [1, 4])
def test_llama_cpp_computes_what_was_trained(
    model: Model, tmp_path: Path, side: int, seed: int
) -> None:
    weights = random_weights(SHAPE)
    write_gguf(tmp_path / "eyes.gguf", SHAPE, weights, matrices="f16")
    projector = MtmdProjector(model, tmp_path / "eyes.gguf", 1)
    dice = random.Random(seed)  # one picture is square, the other one not
    picture = draw(scene(dice), dice, side)
    assert projector.layout(picture.size) == (Tile(SHAPE.n_tokens),)
    found = projector.encode(projector.prepare(Picture.of(picture.tobytes(), *picture.size)), 0)
    expected = embeddings(SHAPE, weights, np.asarray(fitted(picture, SHAPE.image_size)))
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=0.01 * expected.std())


def test_pytorch_computes_the_same() -> None:
    torch = pytest.importorskip("torch")
    network = importlib.import_module("tools.builtin_model.pictures.network")
    eyes, weights = network.Eyes(SHAPE), random_weights(SHAPE)
    eyes.load_state_dict({name: torch.from_numpy(one) for name, one in weights.items()})
    dice = random.Random(0)
    pixels = np.asarray(draw(scene(dice), dice, SHAPE.image_size).resize((SHAPE.image_size,) * 2))
    given = torch.tensor(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        found = eyes(given)[0].numpy()
    expected = embeddings(SHAPE, weights, pixels)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())
