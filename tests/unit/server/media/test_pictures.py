"""Pictures in requests of every protocol: where they stand in prompts, and which are refused."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from serve_app.apis.anthropic import preparation as anthropic
from serve_app.apis.embeddings import preparation as embeddings
from serve_app.apis.llama_server import preparation as llama_server
from serve_app.apis.ollama import preparation as ollama
from serve_app.apis.openai import preparation as openai
from serve_app.apis.responses import preparation as responses
from serve_app.base.errors import (
    CorralError,
    EngineUnavailableError,
    InvalidRequestError,
    MediaError,
    PicturesWantedError,
)
from serve_app.base.values.media import MEDIUM, Picture
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.answering.preparation import Generation, PromptLength
from serve_app.server.answering.streaming import n_tokens
from serve_app.server.answering.vectors import TextsToEmbed
from serve_app.server.media import decoder
from serve_app.server.media.decoder import MediaDecoder
from serve_app.server.model_registry import ModelInfo, ServedModel
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.doubles.api import prepared
from tests.unit.server.harness import ScriptedEngine

Image = pytest.importorskip("PIL.Image")

TOKENIZER = Tokenizer(BUILTIN_MODEL)
SEEING = {"m": ModelInfo("m", 512, TOKENIZER, media=MediaDecoder(sees=True))}
BLIND = {"m": ModelInfo("m", 512, TOKENIZER)}
RED, BLUE = (255, 0, 0), (0, 0, 255)


def file_of(
    colour: tuple[int, int, int] = RED, size: tuple[int, int] = (8, 6), kind: str = "PNG"
) -> bytes:
    """A picture of one colour."""
    made = io.BytesIO()
    Image.new("RGB", size, colour).save(made, kind)
    return made.getvalue()


def b64(data: bytes) -> str:
    """As requests have it."""
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    """As requests have it."""
    return f"data:image/png;base64,{b64(data)}"


def of_openai(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """What is made of a question about pictures."""
    parts = [{"type": "image_url", "image_url": {"url": url(one)}} for one in files]
    content = [{"type": "text", "text": "See"}, *parts, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    return prepared(openai.chat, models, json.dumps(body).encode()).generation


def of_responses(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """The same."""
    parts = [{"type": "input_image", "image_url": url(one), "detail": "low"} for one in files]
    text = {"type": "input_text", "text": "What?"}
    body = {"input": [{"role": "user", "content": [*parts, text]}]}
    made = prepared(responses.response, models, json.dumps(body).encode())
    assert isinstance(made, responses.PreparedResponse)
    assert json.loads(made.items)[0]["content"][0]["image_url"] == url(files[0])
    return made.chat.generation


def of_anthropic(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """The same."""
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(one)}}
        for one in files
    ]
    content = [*parts, {"type": "text", "text": "What?"}]
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    return prepared(anthropic.messages, models, json.dumps(body).encode()).chat.generation


def of_ollama_chat(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """The same."""
    turn = {"role": "user", "content": "What?", "images": [b64(one) for one in files]}
    made = prepared(
        ollama.prepare_chat, models, json.dumps({"model": "m", "messages": [turn]}).encode()
    )
    assert isinstance(made, ollama.PreparedOllamaAnswer)
    return made.chat.generation


def of_ollama_generate(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """The same."""
    body = {"model": "m", "prompt": "What?", "images": [b64(one) for one in files]}
    made = prepared(ollama.generate, models, json.dumps(body).encode())
    assert isinstance(made, ollama.PreparedOllamaAnswer)
    assert not made.has_context
    return made.chat.generation


def of_llama_server(models: Mapping[str, ModelInfo], *files: bytes) -> Generation:
    """The same."""
    prompt = "See " + "<__media__>" * len(files) + " What?"
    body = {"prompt": {"prompt_string": prompt, "multimodal_data": [b64(one) for one in files]}}
    return prepared(llama_server.llama_completion, models, json.dumps(body).encode()).generation


def of_embeddings(models: Mapping[str, ModelInfo], **fields: Any) -> TextsToEmbed:
    """What /v1/embeddings makes of these fields."""
    return prepared(embeddings.embeddings, models, json.dumps(fields).encode())


Ask = Callable[..., Generation]
ASKS = [of_openai, of_responses, of_anthropic, of_ollama_chat, of_ollama_generate, of_llama_server]


@pytest.mark.parametrize("ask", ASKS)
def test_pictures_stand_in_the_prompt_in_their_order(ask: Ask) -> None:
    found = ask(SEEING, file_of(RED), file_of(BLUE, (4, 4)))
    prompt = found.prompt
    assert prompt.count(MEDIUM) == 2
    assert min(prompt) == MEDIUM
    words = TOKENIZER.decode(prompt[prompt.index(MEDIUM) :])
    assert "What?" in words
    assert found.request.media == (
        Picture.of(bytes(RED) * 48, 8, 6),
        Picture.of(bytes(BLUE) * 16, 4, 4),
    )


@pytest.mark.parametrize("ask", ASKS)
def test_a_model_without_a_projector_refuses_them_by_name(ask: Ask) -> None:
    with pytest.raises(MediaError, match=r"Image input.*no projector"):
        ask(BLIND, file_of())


@pytest.mark.parametrize("ask", ASKS)
def test_the_bad_one_is_named(ask: Ask) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Picture 2 of 3: it is none of PNG"):
        ask(SEEING, file_of(), b"<svg/>", file_of())


def test_users_cannot_write_places() -> None:
    content = "<__media__> 123456789012<0>"
    body = {"messages": [{"role": "user", "content": content}]}
    made = prepared(openai.chat, SEEING, json.dumps(body).encode())
    assert made.generation.request.media == ()
    assert content in TOKENIZER.decode(made.prompt, special=True)


def test_texts_are_the_same_tokens_around_a_picture() -> None:
    pictured = of_openai(SEEING, file_of()).prompt
    body = {"messages": [{"role": "user", "content": "See%What?"}]}
    plain = prepared(openai.chat, SEEING, json.dumps(body).encode()).generation.prompt
    (percent,) = TOKENIZER.tokenize("%", False, False)
    assert [percent if token == MEDIUM else token for token in pictured] == list(plain)


def test_what_is_left_to_count_is_told_to_who_counts_pictures() -> None:
    parts = [
        {"type": "image_url", "image_url": url(file_of(size=size))} for size in ((8, 6), (5, 4))
    ]
    body = json.dumps({"messages": [{"role": "user", "content": [parts[0], *parts]}]}).encode()
    found = prepared(openai.input_tokens, SEEING, body)
    assert (found.model, found.sizes) == ("m", ((8, 6), (8, 6), (5, 4)))
    whole = prepared(openai.chat, SEEING, body).generation.prompt
    assert found.n_tokens == len(whole) - 3
    with pytest.raises(InvalidRequestError, match="no projector"):
        prepared(openai.input_tokens, BLIND, body)


async def test_the_engine_counts_the_tokens_of_pictures() -> None:
    engine = ScriptedEngine()
    models = {"m": ServedModel("m", 512, TOKENIZER, engine=engine)}
    assert await n_tokens(models, PromptLength("m", 5, ())) == 5
    assert await n_tokens(models, PromptLength("m", 5, ((8, 6), (8, 4)))) == 5 + 60 + 40
    engine.refusal = EngineUnavailableError("none")
    with pytest.raises(EngineUnavailableError):
        await n_tokens(models, PromptLength("m", 5, ((8, 6),)))


@pytest.mark.parametrize("kind", decoder.FORMATS)
def test_every_format_is_read(kind: str) -> None:
    found = decoder.decode_picture(file_of(BLUE, (16, 16), kind), "it", "messages")
    assert (found.width, found.height) == (16, 16)
    assert all(abs(a - b) < 9 for a, b in zip(found.pixels[:3], BLUE, strict=True))


def test_a_photo_is_turned_as_it_says_and_shrunk() -> None:
    made = io.BytesIO()
    image = Image.new("RGB", (3000, 1500), RED)
    image.paste(BLUE, (0, 0, 1500, 1500))
    exif = Image.Exif()
    exif[0x0112] = 6  # its right side is up
    image.save(made, "JPEG", exif=exif)
    found = decoder.decode_picture(made.getvalue(), "it", "messages")
    assert (found.width, found.height) == (decoder.MAX_SIDE // 2, decoder.MAX_SIDE)
    assert found.pixels[2] > 200 > 50 > found.pixels[0]
    assert found.pixels[-3] > 200 > 50 > found.pixels[-1]


def test_the_same_pixels_have_the_same_key_in_any_file() -> None:
    one, other = (decoder.decode_picture(file_of(kind=k), "it", "m") for k in ("PNG", "BMP"))
    assert one == other
    assert one.key != decoder.decode_picture(file_of(BLUE), "it", "m").key
    assert one.key != decoder.decode_picture(file_of(size=(6, 8)), "it", "m").key


def noise() -> bytes:
    """A picture that is not small in a file."""
    made = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3)).save(made, "PNG")
    return made.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG file whose header says that it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (url(noise()[:4000]), "it cannot be read .*truncated"),
        (url(bomb(60_000)), "it cannot be read .*bomb"),
        (url(bomb(5000)), "5000 x 5000 pixels are more than"),
        (url(b""), "it is none of"),
        (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "it is none of"),
        (url(b"%PDF-1.7 %!PS-Adobe-3.0 EPSF"), "it is none of"),
        ("data:image/png;base64,????", "it is not base64"),
        ("data:image/png,abc", "it is no data URL"),
        ("file:///etc/passwd", "it is no data URL"),
        ("", "it is no data URL"),
    ],
)
def test_what_is_no_picture_is_refused(given: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^it: ({told})"):
        decoder.decode_picture(decoder.from_url(given, "it", "messages"), "it", "messages")


def test_there_are_bounds_on_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="has 50 pictures and sounds"):
        of_openai(SEEING, *[file_of()] * 50)
    monkeypatch.setattr(decoder, "MAX_BYTES", 400)
    with pytest.raises(InvalidRequestError, match="Picture 3 of 3: all up to this one"):
        of_openai(SEEING, *[file_of()] * 3)


def test_urls_are_named_all_at_once_for_who_fetches_them() -> None:
    urls = [url(file_of()), "http://169.254.169.254/latest", "HTTPS://a.example/b.png"]
    with pytest.raises(PicturesWantedError, match="Picture 2 of 3: URLs are not fetched") as caught:
        MediaDecoder(sees=True).decode(urls, "messages")
    assert caught.value.param == "messages"
    assert caught.value.pictures == ((urls[1], "Picture 2 of 3"), (urls[2], "Picture 3 of 3"))


def message(role: str, content: Any) -> bytes:
    """A chat of one more turn."""
    return json.dumps(
        {"messages": [{"role": role, "content": content}, {"role": "user", "content": "x"}]}
    ).encode()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (message("user", [{"type": "input_audio", "input_audio": {"data": "x"}}]), "Audio input"),
        (message("user", [{"type": "image_url"}]), r"messages\.0\.content"),
    ],
)
def test_other_parts_are_refused(body: bytes, told: str) -> None:
    with pytest.raises(CorralError, match=told):
        prepared(openai.chat, SEEING, body)


PARTS = [
    {"type": "text", "text": "See "},
    {"type": "image_url", "image_url": {"url": url(file_of(RED))}},
    {"type": "text", "text": " What?"},
]
PROMPT = {"prompt_string": "See <__media__> What?", "multimodal_data": [b64(file_of(RED))]}


@pytest.mark.parametrize("given", [PROMPT, {"content": PARTS}, [PROMPT], [{"content": PARTS}]])
def test_a_text_with_a_picture_is_one_to_embed(given: Any) -> None:
    found = of_embeddings(SEEING, input=given)
    before, after = (TOKENIZER.tokenize(text, False, True) for text in ("See ", " What?"))
    assert found.texts == ((*before, MEDIUM, *after),)
    assert [medium.size for medium in found.media] == [(8, 6)]
    body = json.dumps({"content": given}).encode()
    assert prepared(embeddings.llama_embedding, SEEING, body) == replace(found, dimensions=None)


def test_pictures_of_several_texts_are_in_the_order_of_their_places() -> None:
    blue = {"prompt_string": "<__media__> a", "multimodal_data": [b64(file_of(BLUE, (4, 4)))]}
    found = of_embeddings(SEEING, input=["See ", blue, [1, 2], PROMPT])
    assert [text.count(MEDIUM) for text in found.texts] == [0, 1, 0, 1]
    assert [medium.size for medium in found.media] == [(4, 4), (8, 6)]


def test_a_chat_to_embed_is_what_the_template_writes_without_an_answer_s_beginning() -> None:
    found = of_embeddings(SEEING, messages=[{"role": "user", "content": PARTS}], dimensions=2)
    text = TOKENIZER.decode([token for token in found.texts[0] if token != MEDIUM], special=True)
    assert text.endswith("What?<|im_end|>\n")
    assert (found.texts[0].count(MEDIUM), len(found.media), found.dimensions) == (1, 1, 2)


@pytest.mark.parametrize(
    ("models", "given", "message"),
    [
        (BLIND, PROMPT, "Image input is not supported"),
        (SEEING, PROMPT | {"prompt_string": "none"}, "0 markers <__media__> for 1 pictures"),
        (SEEING, PROMPT | {"multimodal_data": ["aGVsbG8="]}, "PNG"),
        (SEEING, {"content": [{"type": "image_url"}]}, "must be a text"),
        (SEEING, {"something": "else"}, "must be a text"),
    ],
)
def test_pictures_that_cannot_be_embedded_are_refused(
    models: Mapping[str, ModelInfo], given: Any, message: str
) -> None:
    with pytest.raises(CorralError, match=message):
        of_embeddings(models, input=given)
