"""Pictures over HTTP, from a client to a model with a projector."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.prompt.tokenizer import Tokenizer
from tests.e2e.conftest import Corral, model
from tools.random_models.projector import SHAPES, write_random_projector

Image = pytest.importorskip("PIL.Image")

N_SEEN = 256
"""Tokens of a picture."""


@pytest.fixture(scope="module")
def seeing(
    start_for_module: Callable[[list[dict[str, Any]]], Corral],
    tmp_path_factory: pytest.TempPathFactory,
) -> Corral:
    path: Path = tmp_path_factory.mktemp("projector") / "llava.gguf"
    shape = replace(SHAPES["tiny-llava"], image_size=128)
    write_random_projector(path, shape, Tokenizer(BUILTIN_MODEL).n_embd)
    one = model(None, "seeing", n_slots=2, n_ctx_slot=1024) | {"projector": {"path": str(path)}}
    corral = start_for_module([one, model(BUILTIN_MODEL, "blind", n_slots=2, n_ctx_slot=1024)])
    corral.wait_ready()
    return corral


def url(colour: str, size: tuple[int, int] = (64, 64)) -> str:
    """A picture of one colour."""
    made = io.BytesIO()
    Image.new("RGB", size, colour).save(made, "PNG")
    return f"data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}"


def ask(corral: Corral, name: str, picture: str, words: str, *, n: int = 8) -> Any:
    """A chat completion by OpenAI's client."""
    client = openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    content: Any = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": words},
    ]
    return client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=n,
    )


def test_the_second_question_about_a_picture_costs_its_words(seeing: Corral) -> None:
    picture = url("red", (1024, 1024))
    first = ask(seeing, "seeing", picture, "What is in this picture?").usage
    second = ask(seeing, "seeing", picture, "And how many?").usage
    assert first.prompt_tokens > N_SEEN
    assert second.prompt_tokens_details.cached_tokens >= N_SEEN
    assert seeing.stats()["pictures"]["encoded_tiles"] == 1
    ask(seeing, "seeing", url("blue", (1024, 1024)), "And how many?")
    assert seeing.stats()["pictures"]["encoded_tiles"] == 2


def test_the_tokens_of_pictures_are_counted(seeing: Corral) -> None:
    content = [{"type": "image_url", "image_url": {"url": url("red")}}] * 2
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Which?"}]}]
    body = {"model": "seeing", "messages": messages}
    counted = seeing.http.post("/v1/chat/completions/input_tokens", json=body).json()
    asked = seeing.http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    assert counted["input_tokens"] == asked["usage"]["prompt_tokens"] > 2 * N_SEEN


def test_a_picture_of_many_megabytes_is_read_in_a_worker(seeing: Corral) -> None:
    answer = ask(seeing, "seeing", url("green", (4096, 4096)), "What is it?")
    assert answer.usage.prompt_tokens > N_SEEN


def test_what_cannot_be_seen_is_refused(seeing: Corral) -> None:
    with pytest.raises(openai.InternalServerError, match="no projector"):  # as at llama-server
        ask(seeing, "blind", url("red"), "What is it?")
    with pytest.raises(openai.BadRequestError, match="Picture 1 of 1: it is none of"):
        ask(seeing, "seeing", "data:image/png;base64,aGVsbG8=", "What is it?")
    with pytest.raises(openai.BadRequestError, match="more than 16777216"):
        ask(seeing, "seeing", url("red", (5000, 5000)), "What is it?")


def test_clients_are_told_who_sees(seeing: Corral) -> None:
    cards = {one["id"]: one for one in seeing.http.get("/v1/models").json()["data"]}
    assert [cards[name]["capabilities"] for name in ("seeing", "blind")] == [["vision"], []]
    for name, sees in (("seeing", True), ("blind", False)):
        props = seeing.http.get("/props", params={"model": name}).json()
        assert props["modalities"]["vision"] is sees
        shown = seeing.http.post("/api/show", json={"model": name}).json()
        assert ("vision" in shown["capabilities"]) is sees
