"""Pictures and sounds over HTTP: to models with random projectors, and to the built-in one, which sees."""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.e2e.conftest import Corral, model, wait_until
from tests.unit.server.media.test_sounds import of_rate
from tests.unit.server.media.test_windows import speech
from tools.builtin_model.pictures.drawing import draw
from tools.builtin_model.pictures.questions import described
from tools.builtin_model.pictures.scenes import Scene, Thing
from tools.random_models.projector import SHAPES, write_random_projector

Image = pytest.importorskip("PIL.Image")

N_SEEN = 256
"""Tokens of a picture."""
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
def seeing(
    start_for_module: Callable[..., Corral], tmp_path_factory: pytest.TempPathFactory
) -> Corral:
    """A server of three models: two with random projectors, one of which hears, and the built-in one."""
    folder, size = tmp_path_factory.mktemp("projectors"), {"n_slots": 2, "n_ctx_slot": 1024}
    eyes = replace(SHAPES["tiny-llava"], image_size=128)
    models = [model(None, "demo", **size)]
    for name, shape in (("hearing", SHAPES["tiny-qwen2audio"]), ("seeing", eyes)):
        path: Path = folder / f"{name}.gguf"
        write_random_projector(path, shape, Tokenizer(BUILTIN_MODEL).model.n_embd)
        models.insert(0, model(None, name, **size) | {"projector": {"path": str(path)}})
    corral = start_for_module(models, local=True)
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
        model=name, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=n
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


def test_a_text_with_a_picture_becomes_a_vector(seeing: Corral) -> None:
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)

    def content(colour: str) -> Any:
        picture = {"type": "image_url", "image_url": {"url": url(colour)}}
        return {"content": [picture, {"type": "text", "text": WHAT}]}

    given: Any = [*map(content, ("red", "blue", "red")), WHAT]
    answer = client.embeddings.create(model="seeing", input=given)
    red, blue, again, plain = (np.array(one.embedding) for one in answer.data)
    assert red @ again > 0.9999
    assert max(red @ blue, red @ plain) < 0.9999
    assert answer.usage.prompt_tokens >= 3 * N_SEEN
    with pytest.raises(openai.InternalServerError, match="does not see"):  # as at llama-server
        client.embeddings.create(model="hearing", input=given)


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
    with pytest.raises(openai.InternalServerError, match="does not see"):  # as at llama-server
        ask(seeing, "hearing", url("red"), "What is it?")
    with pytest.raises(openai.BadRequestError, match="Picture 1 of 1: it is none of"):
        ask(seeing, "seeing", "data:image/png;base64,aGVsbG8=", "What is it?")
    with pytest.raises(openai.BadRequestError, match="more than 16777216"):
        ask(seeing, "seeing", url("red", (5000, 5000)), "What is it?")


def test_clients_are_told_who_sees(seeing: Corral) -> None:
    cards = {one["id"]: one for one in seeing.http.get("/v1/models").json()["data"]}
    assert [cards[name]["capabilities"] for name in ("seeing", "demo", "hearing")] == [
        ["vision"],
        ["vision"],
        ["audio"],
    ]
    for name, sees in (("seeing", True), ("demo", True), ("hearing", False)):
        props = seeing.http.get("/props", params={"model": name}).json()
        assert props["modalities"]["vision"] is sees
        shown = seeing.http.post("/api/show", json={"model": name}).json()
        assert ("vision" in shown["capabilities"]) is sees


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
    seeing: Corral, ask: Callable[[Corral, str, str], str]
) -> None:
    for about in (STAR, CIRCLES, SEVEN):
        expected = described(about)
        assert ask(seeing, png(about), WHAT) == f"{expected[0].upper()}{expected[1:]}."


def test_each_question_has_its_own_answer(seeing: Corral) -> None:
    square = png(SQUARE)
    assert by_chat(seeing, square, "Where is the square?") == "At the bottom left."
    assert by_chat(seeing, square, "What colour is the square?") == "The square is purple."
    assert by_chat(seeing, square, "What shape is this?") == "A square."
    assert by_chat(seeing, png(CIRCLES), "How many circles are there?") == "Three."
    assert by_chat(seeing, png(SEVEN), "Which number is this?") == "7."


def test_text_without_pictures_is_answered_as_ever(seeing: Corral) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
        "temperature": 0,
    }
    made = seeing.http.post("/v1/chat/completions", json=body).json()
    assert made["choices"][0]["message"]["content"] == "The capital of Italy is Rome."


SPEECH = speech((21.0, 0.1), (0.5, 0.001), (8.0, 0.1), (0.5, 0.001), (12.0, 0.1))
"""Two windows of noise."""


def test_openai_s_client_has_files_transcribed_in_all_formats(seeing: Corral) -> None:
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)
    heard: Any = {"file": ("a.mp3", SPEECH), "model": "hearing", "extra_body": {"max_tokens": 8}}
    plain: Any = client.audio.transcriptions.create(**heard)
    assert plain.usage.output_tokens <= 16
    texts: dict[str, Any] = {
        name: client.audio.transcriptions.create(**heard, response_format=name)
        for name in ("text", "srt", "vtt", "verbose_json")
    }
    assert texts["text"] == f"{plain.text}\n"
    assert "00:00:00,000 --> 00:00:2" in texts["srt"]
    assert texts["vtt"].startswith("WEBVTT")
    verbose = texts["verbose_json"]
    assert (verbose.text, verbose.duration) == (plain.text, 42.0)
    assert [0 < len(one.tokens) <= 8 for one in verbose.segments] == [True, True]
    assert verbose.segments[0].end == verbose.segments[1].start
    assert all(one.avg_logprob < 0 for one in verbose.segments)
    *deltas, done = client.audio.transcriptions.create(**heard, stream=True)
    assert "".join(one.delta for one in deltas) == done.text == plain.text
    form: Any = {"files": {"file": ("a.wav", SPEECH)}, "data": {"model": "hearing"}}
    assert seeing.http.post("/v1/audio/translations", **form).json()["text"]


def test_files_that_are_no_sound_are_refused_within_a_second(seeing: Corral) -> None:
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)
    bad = {"none of WAV": b"hello" * 2**20, "8000.0 seconds": of_rate(1), "cut off": SPEECH[:-1000]}
    for why, data in bad.items():
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError, match=why):
            client.audio.transcriptions.create(file=("a.wav", data), model="hearing")
        assert time.monotonic() - began < 1
    with pytest.raises(openai.APIStatusError, match="more than 26279936 bytes"):
        client.audio.transcriptions.create(file=("a.wav", bytes(2**25)), model="hearing")
    with pytest.raises(openai.APIStatusError, match="does not hear"):
        client.audio.transcriptions.create(file=("a.wav", SPEECH), model="demo")


def test_a_long_file_is_heard_to_its_end_and_ends_with_its_client(seeing: Corral) -> None:
    minutes = speech(*((20.5, 0.1), (0.5, 0.001)) * 6)
    form: Any = {"files": {"file": ("a.wav", minutes)}, "timeout": 120}
    fields = {"model": "hearing", "max_tokens": "1", "response_format": "verbose_json"}
    answer = seeing.http.post("/v1/audio/transcriptions", data=fields, **form).json()
    assert (answer["duration"], answer["segments"][-1]["end"]) == (126.0, 126.0)
    assert len(answer["segments"]) == 6
    fields = {"model": "hearing", "stream": "true", "seed": "1", "temperature": "1"}
    url = "/v1/audio/transcriptions"
    with seeing.http.stream("POST", url, data=fields, **form) as response:
        assert next(response.iter_lines()).startswith('data: {"type":"transcript.text.delta"')
    wait_until(lambda: not seeing.stats(1)["queue"]["running"], 20, "its requests have ended")
