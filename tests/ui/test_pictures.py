"""Pictures and recordings on the page: chosen, pasted, dropped or spoken, for models with projectors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.e2e.conftest import Corral, model
from tests.ui.conftest import Open, served, sync_api
from tests.ui.test_chat import done, say
from tools.random_models.projector import SHAPES, write_random_projector

expect = sync_api.expect

N_SEEN = 256
"""Tokens of a picture."""
GIVE = """([target, kind, data, name, type]) => {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent(kind, { ...options, clipboardData: transfer })
    : new DragEvent(kind, { ...options, dataTransfer: transfer });
  document.querySelector(target).dispatchEvent(event);
}"""
"""Pastes or drops a file."""


@pytest.fixture(scope="module")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corral]:
    """A model that sees, and one that hears."""
    folder, models = tmp_path_factory.mktemp("projectors"), []
    eyes = replace(SHAPES["tiny-llava"], image_size=128)
    for name, shape in (("seeing", eyes), ("hearing", SHAPES["tiny-qwen2audio"])):
        path: Path = folder / f"{name}.gguf"
        write_random_projector(path, shape, Tokenizer(BUILTIN_MODEL).model.n_embd)
        projector = {"projector": {"path": str(path)}}
        models.append(model(None, name, n_slots=2, n_ctx_slot=1536) | projector)
    yield from served(models)


def drawn(width: int, height: int, kind: str = "PNG", orientation: int = 0) -> bytes:
    """A picture, red at the left."""
    image = Image.new("RGB", (width, height), "blue")
    image.paste("red", (0, 0, width // 2, height))
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif)
    return file.getvalue()


def give(page: Any, target: str, kind: str, data: bytes, name: str, media_type: str) -> None:
    """Paste or drop a file."""
    page.evaluate(GIVE, [target, kind, base64.b64encode(data).decode(), name, media_type])


def test_a_picture_is_shown_scaled_asked_about_and_kept(
    seeing_server: Corral, open_page: Open
) -> None:
    page = open_page(seeing_server)
    tray = page.locator("#pictures img")
    photo = {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": drawn(3000, 1500, "JPEG", 6)}
    page.set_input_files("#picture-file", [photo])
    expect(tray).to_have_count(1)
    give(page, "#question", "paste", drawn(40, 30), "b.png", "image/png")
    expect(tray).to_have_count(2)
    give(page, "#messages", "drop", drawn(50, 30), "c.png", "image/png")
    expect(tray).to_have_count(3)
    for i, (width, height) in enumerate([(512, 1024), (40, 30), (50, 30)]):  # turned, and shrunk
        expect(tray.nth(i)).to_have_js_property("naturalWidth", width)
        expect(tray.nth(i)).to_have_js_property("naturalHeight", height)
    page.get_by_role("button", name="Remove picture 2").click()
    expect(tray).to_have_count(2)

    with page.expect_request("**/v1/chat/completions") as asked:
        answer = say(page, "What is it?")
    content = json.loads(asked.value.post_data)["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    read = Image.open(io.BytesIO(base64.b64decode(content[0]["image_url"]["url"].split(",")[1])))
    assert read.size == (512, 1024)
    pixels = np.asarray(read)
    top, bottom = pixels[100, 256], pixels[900, 256]
    assert top[0] > 200 > 50 > top[2]
    assert bottom[2] > 200 > 50 > bottom[0]
    done(answer)
    expect(tray).to_have_count(0)
    expect(page.locator(".message.user img")).to_have_count(2)
    page.reload()
    expect(page.locator(".message.user img")).to_have_count(2)
    with page.expect_response("**/v1/chat/completions") as told:
        done(say(page, "And now?"))
    assert told.value.status == 200
    assert seeing_server.stats()["pictures"]["encoded_tiles"] == 2
    usage = page.evaluate("JSON.parse(localStorage['corral.chats'])[0].messages.at(-1).meta.usage")
    assert usage["prompt_tokens"] > 2 * N_SEEN


def test_who_cannot_see_is_given_none(seeing_server: Corral, open_page: Open) -> None:
    page = open_page(seeing_server)
    button, tray = page.get_by_role("button", name="Add pictures"), page.locator("#pictures img")
    expect(button).to_be_visible()
    page.set_input_files(
        "#picture-file", [{"name": "a.png", "mimeType": "image/png", "buffer": drawn(40, 30)}]
    )
    expect(tray).to_have_count(1)
    page.select_option("#chat-model", "hearing")
    expect(button).to_be_hidden()
    expect(tray).to_have_count(0)
    give(page, "#messages", "drop", drawn(50, 30), "c.png", "image/png")
    page.select_option("#chat-model", "seeing")
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    give(page, "#question", "paste", svg, "x.svg", "image/svg+xml")
    expect(page.get_by_role("alert")).to_contain_text("x.svg is not a picture")
    expect(tray).to_have_count(0)


def test_what_is_said_becomes_the_text_of_the_next_message(
    seeing_server: Corral, open_page: Open
) -> None:
    """The browser's microphone is a double, which beeps."""
    page = open_page(seeing_server)
    button, field = page.locator("#record"), page.locator("#question")
    expect(button).to_be_hidden()
    page.select_option("#chat-model", "hearing")
    field.fill("He said:")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(1500)  # of beeps
    with page.expect_response("**/v1/audio/transcriptions") as told:
        button.click()
    text = told.value.json()["text"]
    assert text
    expect(field).to_have_value(f"He said: {text.strip()}")
    expect(button).to_have_attribute("aria-pressed", "false")
