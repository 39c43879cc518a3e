"""Open WebUI: chats by both ways in which it asks servers, over its own API and in a browser.

The browser's part needs one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

URL = sys.argv[1]
MODELS = {"demo": "OpenAI's API", "demo:latest": "Ollama's"}
QUESTION, ANSWER = "What is the capital of Italy?", "The capital of Italy is Rome."
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = free.getsockname()[1]
OWN = f"http://127.0.0.1:{PORT}"
SERVERS = {"OLLAMA_BASE_URL": URL, "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none"}
# Its tools take 10,000 tokens of each prompt, and titles as much as an answer.
SMALL = {
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
}
ALONE = {
    "DATA_DIR": str(Path("data").absolute()),
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": "none",
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ANONYMIZED_TELEMETRY": "false",
}


def ask(path: str, body: object = None, token: str | None = None) -> Any:
    """Its own API's answer."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{OWN}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_until_it_answers(process: subprocess.Popen[bytes]) -> None:
    """For some minutes at most."""
    for _ in range(170):
        assert process.poll() is None, "it has ended"
        try:
            ask("/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise TimeoutError("it does not answer")


def chat_by_its_api() -> None:
    """Whole answers."""
    token = ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    found = {model["id"] for model in ask("/api/models", token=token)["data"]}
    assert found >= set(MODELS), found
    for model in MODELS:
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
        answer = ask("/api/chat/completions", body, token)
        assert answer["choices"][0]["message"]["content"] == ANSWER, answer


def chat_in_a_browser(chromium: str) -> None:
    """Streams."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page()
        page.set_default_timeout(60_000)
        for first, model in enumerate(MODELS):
            page.goto(f"{OWN}/?models={model}")
            if first == 0:
                page.get_by_role("button", name="Okay, Let's Go!").click()
            page.locator("#chat-input").click()
            page.keyboard.type(QUESTION)
            page.keyboard.press("Enter")
            page.get_by_text(ANSWER).first.wait_for()
        browser.close()


with subprocess.Popen(
    [
        Path(sys.executable).with_name("open-webui"),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
    ],
    env={**os.environ, **SERVERS, **SMALL, **ALONE},
    stdin=subprocess.DEVNULL,
) as server:
    try:
        wait_until_it_answers(server)
        chat_by_its_api()
        if CHROMIUM is not None:
            chat_in_a_browser(CHROMIUM)
    finally:
        server.terminate()
