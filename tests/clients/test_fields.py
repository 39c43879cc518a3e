"""Every field that the newest SDKs know is sorted: see `tests/unit/apis/test_sdk_fields.py`."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from pydantic import BaseModel

from serve_app.apis.anthropic.preparation import CountTokensRequest, MessagesRequest
from serve_app.apis.embeddings.preparation import EmbeddingsRequest
from serve_app.apis.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from serve_app.apis.openai.preparation import CompletionRequest
from serve_app.apis.responses.preparation import ResponsesRequest
from serve_app.server.answering.messages import ChatCompletionRequest
from tests.clients import sdk_types
from tests.clients.environment import FOLDER, NODE
from tests.unit.apis.test_sdk_fields import READ_EARLIER, REQUESTS, not_sorted

_ANTHROPIC, _OPENAI = "@anthropic-ai/sdk/resources", "openai/resources"
_CHAT = "chat/completions/completions.d.ts"
INTERFACES: list[tuple[str, str, type[BaseModel]]] = [
    (f"{_OPENAI}/{_CHAT}", "ChatCompletionCreateParamsBase", ChatCompletionRequest),
    (f"{_OPENAI}/completions.d.ts", "CompletionCreateParamsBase", CompletionRequest),
    (f"{_OPENAI}/responses/responses.d.ts", "ResponseCreateParamsBase", ResponsesRequest),
    (f"{_OPENAI}/embeddings.d.ts", "EmbeddingCreateParams", EmbeddingsRequest),
    (f"{_ANTHROPIC}/messages/messages.d.ts", "MessageCreateParamsBase", MessagesRequest),
    (f"{_ANTHROPIC}/messages/messages.d.ts", "MessageCountTokensParams", CountTokensRequest),
    (f"{_ANTHROPIC}/beta/messages/messages.d.ts", "MessageCreateParamsBase", MessagesRequest),
    (f"{_ANTHROPIC}/beta/messages/messages.d.ts", "MessageCountTokensParams", CountTokensRequest),
    ("ollama/dist/browser.d.ts", "ChatRequest", OllamaChatRequest),
    ("ollama/dist/browser.d.ts", "GenerateRequest", OllamaGenerateRequest),
]  # fmt: skip


def test_the_fields_of_the_python_packages() -> None:
    python = FOLDER / "bin" / "python"
    made = subprocess.run(
        [python, sdk_types.__file__, *REQUESTS], capture_output=True, text=True, check=True
    )
    types = json.loads(made.stdout)
    found = {place: list(not_sorted(types, place, model)) for place, model in REQUESTS.items()}
    assert {place: paths for place, paths in found.items() if paths} == {}


@pytest.mark.parametrize(("file", "interface", "model"), INTERFACES)
def test_the_fields_of_the_packages_of_npm(
    file: str, interface: str, model: type[BaseModel]
) -> None:
    """Those at the top: both packages of a protocol are made of one description."""
    files = sorted((NODE / "node_modules").glob(file))
    if not files:
        pytest.skip("there is no npm")
    source = files[0].read_text()
    (body,) = re.findall(rf"^(?:export )?interface {interface} {{\n(.*?)^}}", source, re.M | re.S)
    names = re.findall(r"^    (\w+)\??:", body, re.M)
    assert "model" in names
    types = {interface: {"kinds": [], "fields": {name: [] for name in names}}}
    left = {*not_sorted(types, interface, model)} - READ_EARLIER
    assert left == set()
