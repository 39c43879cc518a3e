"""The built-in model sees: drawn pictures, by each protocol, with answers that are right or wrong."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import Corral, model
from tools.builtin_model.pictures.drawing import draw
from tools.builtin_model.pictures.questions import described
from tools.builtin_model.pictures.scenes import Scene, Thing

pytest.importorskip("PIL.Image")

STAR = Scene("one", (Thing("star", "red", 0.5, 0.5, 0.6, 0.0),), None, True, 1.0)
CIRCLES = Scene(
    "many",
    tuple(
        Thing("circle", "blue", x, y, 0.25, 0.0) for x, y in ((0.2, 0.3), (0.7, 0.25), (0.5, 0.75))
    ),
    None,
    True,
    1.0,
)
SEVEN = Scene("digit", (Thing("7", "green", 0.5, 0.5, 0.6, 0.0),), None, True, 1.0)
SQUARE = Scene(
    "one", (Thing("square", "purple", 1 / 6, 5 / 6, 0.25, 0.0),), "at the bottom left", True, 1.0
)
WHAT = "What is in this picture?"


@pytest.fixture(scope="module")
def demo(start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    corral = start_for_module([model(None, "demo", n_slots=2, n_ctx_slot=1024)])
    corral.wait_ready()
    return corral


def png(about: Scene, side: int = 200) -> str:
    """The scene's picture in base64."""
    file = io.BytesIO()
    draw(about, random.Random(0), side).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def by_chat(corral: Corral, data: str, question: str) -> str:
    client = openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    content: Any = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    messages: Any = [{"role": "user", "content": content}]
    made = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    return made.choices[0].message.content or ""


def by_responses(corral: Corral, data: str, question: str) -> str:
    client = openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        {"type": "input_text", "text": question},
    ]
    given: Any = [{"role": "user", "content": content}]
    return client.responses.create(model="demo", input=given, temperature=0).output_text


def by_messages(corral: Corral, data: str, question: str) -> str:
    client = anthropic.Anthropic(base_url=corral.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    messages: Any = [{"role": "user", "content": content}]
    made: Any = client.messages.create(
        model="demo", messages=messages, max_tokens=40, extra_body={"temperature": 0}
    )
    return str(made.content[0].text)


def by_ollama(corral: Corral, data: str, question: str) -> str:
    messages = [{"role": "user", "content": question, "images": [data]}]
    body = {"model": "demo", "messages": messages, "options": {"temperature": 0}, "stream": False}
    return str(corral.http.post("/api/chat", json=body).json()["message"]["content"])


def by_completion(corral: Corral, data: str, question: str) -> str:
    text = f"<|im_start|>user\n<__media__>{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = {"prompt_string": text, "multimodal_data": [data]}
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "n_predict": 40}
    return str(corral.http.post("/completion", json=body).json()["content"])


PROTOCOLS = (by_chat, by_responses, by_messages, by_ollama, by_completion)


@pytest.mark.parametrize("ask", PROTOCOLS, ids=lambda ask: ask.__name__)
def test_each_protocol_shows_the_model_what_there_is(
    demo: Corral, ask: Callable[[Corral, str, str], str]
) -> None:
    for about in (STAR, CIRCLES, SEVEN):
        expected = described(about)
        assert ask(demo, png(about), WHAT) == f"{expected[0].upper()}{expected[1:]}."


def test_each_question_has_its_own_answer(demo: Corral) -> None:
    square = png(SQUARE)
    assert by_chat(demo, square, "Where is the square?") == "At the bottom left."
    assert by_chat(demo, square, "What colour is the square?") == "The square is purple."
    assert by_chat(demo, square, "What shape is this?") == "A square."
    assert by_chat(demo, png(CIRCLES), "How many circles are there?") == "Three."
    assert by_chat(demo, png(SEVEN), "Which number is this?") == "7."


def test_text_without_pictures_is_answered_as_ever(demo: Corral) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
        "temperature": 0,
    }
    made = demo.http.post("/v1/chat/completions", json=body).json()
    assert made["choices"][0]["message"]["content"] == "The capital of Italy is Rome."


def test_clients_are_told_that_it_sees(demo: Corral) -> None:
    assert demo.http.get("/props").json()["modalities"]["vision"] is True
    assert demo.http.get("/v1/models").json()["data"][0]["capabilities"] == ["vision"]
    shown = demo.http.post("/api/show", json={"model": "demo"}).json()
    assert "vision" in shown["capabilities"]
