"""The same pictures and words to llama-server and to Corral: the same tokens, as likely to rounding.

The weights are random, so the texts mean nothing; but the encoders cut, resize and count as LLaVA's,
SmolVLM's, Gemma 3's and Qwen's do, and what a model says depends on every pixel.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from loadtests.common.servers import (
    corral_is_ready,
    is_healthy,
    local_command,
    running,
    write_config,
)
from serve_app.prompt.tokenizer import Tokenizer
from tests.integration.models.forgetful_models import write_gemma3
from tests.peers.answers import Pair
from tests.peers.conftest import client, server_binary
from tools.random_models.model import SHAPES as MODELS
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import (
    IDEFICS3_TOKENS,
    QWEN_TOKENS,
    SHAPES,
    write_random_projector,
)

N_CTX, N_BATCH, N_TOKENS = 4096, 512, 6
ROUNDING = 0.005
"""Of a log-probability: caches have 11 bits, and batches other sizes."""
ASCII = "root ::= [ -~]*"
"""llama-server leaves out the log-probabilities of tokens with parts of characters."""


def write_model(path: Path) -> None:
    """A text model with the control tokens that SmolVLM's pictures stand between."""
    write_random_gguf(path, MODELS["tiny"], "f32", more_control=IDEFICS3_TOKENS)


def write_windowed(path: Path) -> None:
    """A text model with windows, and the control tokens of Gemma's pictures."""
    write_gemma3(path, ("<start_of_image>", "<end_of_image>"))


def write_qwen2vl(path: Path) -> None:
    """A text model with positions in several dimensions, and the control tokens of Qwen's pictures."""
    write_random_gguf(path, MODELS["tiny-qwen2vl"], "f32", more_control=QWEN_TOKENS)


def write_qwen3vl(path: Path) -> None:
    """The same, whose first layer sees a part of pictures of its own."""
    write_random_gguf(path, MODELS["tiny-qwen3vl"], "f32", more_control=QWEN_TOKENS)


KINDS: dict[str, Callable[[Path], None]] = {
    "thin-llava": write_model,
    "thin-smolvlm": write_model,
    "thin-gemma3": write_windowed,
    "thin-qwen2vl": write_qwen2vl,
    "thin-qwen2.5vl": write_qwen2vl,
    "thin-qwen3vl": write_qwen3vl,
}


@pytest.fixture(scope="module", params=KINDS)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Both servers, with a model and a projector of one kind."""
    folder = tmp_path_factory.mktemp("seeing")
    model, projector = folder / "model.gguf", folder / "projector.gguf"
    KINDS[request.param](model)
    write_random_projector(projector, SHAPES[request.param], Tokenizer(model).model.n_embd)
    with both(model, projector) as pair:
        yield pair


@contextmanager
def both(model: Path, projector: Path) -> Iterator[Pair]:
    """Both servers, with these."""

    def theirs(_: Path, port: int) -> list[str | Path]:
        return [
            *(server_binary(), "--model", model, "--mmproj", projector, "--port", str(port)),
            *("--parallel", "1", "--ctx-size", str(N_CTX), "--batch-size", str(N_BATCH)),
            *("--threads", "1", "--flash-attn", "on", "--no-warmup", "--alias", "model"),
        ]

    def ours(directory: Path, port: int) -> list[str | Path]:
        engine = {
            "n_slots": 1,
            "n_ctx_slot": N_CTX,
            "n_batch": N_BATCH,
            "threads": 1,
            "flash_attn": True,
        }
        entry = {
            "id": "model",
            "source": {"path": str(model)},
            "projector": {"path": str(projector)},
            "engine": engine,
        }
        config = write_config(directory, [entry], port)
        return local_command(config)

    with (
        running(theirs, is_healthy) as a,
        running(ours, corral_is_ready) as b,
        client(a.url) as one,
        client(b.url) as other,
    ):
        yield Pair(one, other)


def picture(seed: int, width: int, height: int, kind: str = "PNG") -> dict[str, Any]:
    """Squares of random colours, as a part of a message."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, kind)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def words(text: str) -> dict[str, Any]:
    """Text, as a part of a message."""
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    """A turn."""
    return {"role": "user", "content": list(parts)}


CHATS: dict[str, list[dict[str, Any]]] = {
    "no picture": [user(words("What is it?"))],
    "square": [user(picture(1, 512, 512), words("What is in this picture?"))],
    "small": [user(words("What is it?"), picture(2, 30, 20), words("Say."))],
    "wide": [user(picture(3, 1000, 300), words("What is it?"))],
    "high": [user(picture(4, 211, 640), words("What is it?"))],
    "bmp": [user(picture(5, 90, 90, "BMP"), words("What is it?"))],
    "two": [user(picture(6, 64, 64), picture(7, 80, 64), words("Which of them?"))],
    "between": [
        user(words("First:"), picture(8, 64, 64), words("second:"), picture(9, 64, 64), words("?"))
    ],
    "earlier": [
        {"role": "system", "content": "Be brief."},
        user(picture(10, 100, 100), words("What is it?")),
        {"role": "assistant", "content": "A square."},
        user(words("Of what colour?")),
    ],
}


class Step(NamedTuple):
    """One generated token."""

    token: bytes
    likely: dict[bytes, float]
    """The log-probabilities of the first few candidates."""


def steps(body: Any) -> list[Step]:
    """What an answer tells of its tokens."""
    return [
        Step(
            bytes(one["bytes"]),
            {bytes(top["bytes"]): top["logprob"] for top in one["top_logprobs"]},
        )
        for one in body["choices"][0]["logprobs"]["content"]
    ]


@pytest.mark.parametrize("name", CHATS)
def test_pictures_are_seen_alike(seeing: Pair, name: str) -> None:
    assert_alike(seeing, CHATS[name])


def assert_alike(pair: Pair, messages: list[dict[str, Any]], rounding: float = ROUNDING) -> None:
    """Both servers have as many tokens for a chat, and find the same answers as likely."""
    body = {
        "messages": messages,
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 8,
        "ignore_eos": True,
        "grammar": ASCII,
    }
    theirs, ours = pair.ask("POST", "/v1/chat/completions", body)
    assert (theirs.status, ours.status) == (200, 200), (theirs.body, ours.body)
    usages = [one.body["usage"]["prompt_tokens"] for one in (theirs, ours)]
    assert usages[1] == usages[0]
    counts = pair.ask("POST", "/v1/chat/completions/input_tokens", {"messages": messages})
    assert [one.body["input_tokens"] for one in counts] == usages
    found = list(zip(steps(theirs.body), steps(ours.body), strict=True))
    assert len(found) == N_TOKENS
    for one, other in found:
        assert max(one.likely.values()) - min(one.likely.values()) > rounding  # they tell something
        common = one.likely.keys() & other.likely.keys()
        assert len(common) >= len(one.likely) - 1
        for token in common:
            assert other.likely[token] == pytest.approx(one.likely[token], abs=rounding)
        if one.token != other.token:  # a tie
            assert one.likely[other.token] == pytest.approx(one.likely[one.token], abs=rounding)
            break
