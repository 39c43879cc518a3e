"""Every field of a request that SDKs know is sorted, and a new one is noticed by its name.

A field is honoured if the request's model has it. Else a table of that model says what happens: NEUTRAL,
REFUSED or INERT. `make test-clients` reads the newest SDKs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import BaseModel

from serve_app.apis.anthropic.preparation import CountTokensRequest, MessagesRequest
from serve_app.apis.embeddings.preparation import EmbeddingsRequest
from serve_app.apis.ollama.protocol import (
    OllamaChatRequest,
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from serve_app.apis.openai.preparation import CompletionRequest
from serve_app.apis.responses.preparation import ResponsesRequest
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.http.request_model import Foreign, RequestModel
from tests.clients.sdk_types import Graph, fields, graph, kinds, members

_CREATE = "CreateParamsStreaming"
REQUESTS: dict[str, type[BaseModel]] = {
    f"openai.types.chat.completion_create_params.Completion{_CREATE}": ChatCompletionRequest,
    f"openai.types.completion_create_params.Completion{_CREATE}": CompletionRequest,
    f"openai.types.responses.response_create_params.Response{_CREATE}": ResponsesRequest,
    "openai.types.responses.input_token_count_params.InputTokenCountParams": ResponsesRequest,
    "openai.types.embedding_create_params.EmbeddingCreateParams": EmbeddingsRequest,
    f"anthropic.types.message_create_params.Message{_CREATE}": MessagesRequest,
    f"anthropic.types.beta.message_create_params.Message{_CREATE}": MessagesRequest,
    "anthropic.types.message_count_tokens_params.MessageCountTokensParams": CountTokensRequest,
    "anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams": CountTokensRequest,
    "ollama._types.ChatRequest": OllamaChatRequest,
    "ollama._types.GenerateRequest": OllamaGenerateRequest,
    "ollama._types.EmbedRequest": OllamaEmbedRequest,
    "ollama._types.EmbeddingsRequest": OllamaEmbeddingsRequest,
    "ollama._types.ShowRequest": OllamaShowRequest,
    "ollama._types.DeleteRequest": OllamaShowRequest,
    "ollama._types.PullRequest": OllamaPullRequest,
    "ollama._types.CopyRequest": OllamaCopyRequest,
    "ollama._types.CreateRequest": OllamaCreateRequest,
}
"""Types of SDKs, and the models of the requests that their clients send."""

READ_EARLIER = {
    # Validators bring these into the form of the model before it sees them.
    *("messages.content:refusal", "input.content:refusal"),
    *("messages.content:search_result", "messages.content:document"),
    *("messages.content.content:search_result", "messages.content.content:document"),
    *("tool_choice.allowed_tools", "tool_choice:custom", "tools.custom"),
    *("tools.format.definition", "tools.format.syntax"),
    "from_",
}
REFUSED = {
    # Parts and items that make a request an error: see `refuse_media`, and the errors of the models.
    *("messages.content:file", "messages.content.source:file", "messages.content:container_upload"),
    *("input.content:input_file", "input.output:input_file"),
    *("input:compaction", "input:compaction_trigger"),
    *("messages.content.tool:mcp_tool_reference", "messages.content.tool:mcp_toolset_reference"),
    *("tools.environment:container_auto", "tools.environment:container_reference"),
}
NAMED = {
    # Tools that only the servers of OpenAI or Anthropic run, or that are made for their models alone.
    *("advisor", "browser_toolset", "code_execution", "code_interpreter", "computer"),
    *("computer_toolset", "computer_use_preview", "file_search", "image_generation", "mcp"),
    *("mcp_toolset", "programmatic_tool_calling", "tool_search_tool_bm25", "tool_search_tool_regex"),
    *("web_fetch", "web_search", "web_search_preview"),
    # What such tools left in a history: texts are kept, and the answer names the rest.
    *("advisor_tool_result", "bash_code_execution_tool_result", "browser_state"),
    *("code_execution_tool_result", "code_interpreter_call", "compaction", "computer_call"),
    *("computer_call_output", "fallback"),
    *("file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response"),
    *("mcp_call", "mcp_list_tools", "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use", "program"),
    *("program_output", "server_tool_use", "text_editor_code_execution_tool_result"),
    *("web_fetch_tool_result", "web_search_call", "web_search_tool_result"),
}  # fmt: skip
CLIENTS = {"bash", "memory", "text_editor"}
"""Tools of Anthropic's with a date, whose schemas Corral knows."""


def _without_date(kind: str) -> str:
    name, _, date = kind.rpartition("_")
    return name if date.isdecimal() and len(date) == 8 else kind


def not_sorted(
    types: Graph, place: str, model: type[BaseModel], path: str = "", seen: Any = None
) -> Iterator[str]:
    """The paths of the fields of a type that the model does not sort, and of kinds that nobody knows."""
    seen = set() if seen is None else seen
    if (place, model) in seen or model.model_config.get("extra") == "ignore":
        return
    seen.add((place, model))
    own = fields(model)
    tables = {*model.NEUTRAL, *model.INERT} if issubclass(model, RequestModel) else set()
    for name, inner in types[place]["fields"].items():
        here = f"{path}{name}".replace("input.tools", "tools")
        if name not in own:
            if name not in tables and here not in READ_EARLIER:
                yield here
            continue
        models = [one for one in members(own[name]) if not issubclass(one, Foreign)]
        for one in inner:
            values = set(types[one]["kinds"])
            fitting = [
                ours for ours in models if not values or not kinds(ours) or values & kinds(ours)
            ]
            plain = {_without_date(value.split("|")[0]) for value in values}
            known = {f"{here}:{value}" for value in values} & (READ_EARLIER | REFUSED)
            if fitting and (len(fitting) == 1 or values):
                for ours in fitting:
                    yield from not_sorted(types, one, ours, f"{here}.", seen)
            elif models and values and not known and not plain & (NAMED | CLIENTS):
                yield f"{here}:{min(values)}"


@pytest.mark.parametrize("place", REQUESTS)
def test_all_fields_are_sorted(place: str) -> None:
    if find_spec(place.partition(".")[0]) is None:
        pytest.skip("this SDK is not in the lock: make test-clients has it")
    assert list(not_sorted(graph([place]), place, REQUESTS[place])) == []


def test_a_new_field_is_noticed_by_its_name() -> None:
    place = "anthropic.types.message_create_params.MessageCreateParamsStreaming"
    types = graph([place])
    types[place]["fields"]["zeal"] = []
    types["new"] = {"kinds": ["zeal_block"], "fields": {}}
    message = types[types[place]["fields"]["messages"][0]]
    message["fields"]["content"].append("new")
    message["fields"]["zest"] = []
    found = list(not_sorted(types, place, MessagesRequest))
    assert found == ["messages.content:zeal_block", "messages.zest", "zeal"]
