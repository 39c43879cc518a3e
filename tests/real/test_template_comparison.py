"""Chat templates in llama.cpp's source: each writes conversations as in transformers, or a reason is told.

The reference is transformers 5.24.0, `utils/chat_template_utils.py`: its settings of Jinja2, its names for
reasoning, and `continue_final_message`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import pytest
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.answering import preparation
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.model_registry import ModelInfo
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.real.models import LLAMA_CPP

TEMPLATES = sorted((LLAMA_CPP / "models/templates").glob("*.jinja"))
Json = dict[str, Any]
TAG = "CONTINUE_FINAL_MESSAGE_TAG "

# -- transformers ---------------------------------------------------------------------------------------


class GenerationTag(Extension):
    """`{% generation %}`, which transformers has for training."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # Jinja's type is a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the content as the body of a call."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def with_names_of_reasoning(message: Json) -> Json:
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


class NotTakenError(Exception):
    """transformers refuses the conversation."""


def reference(source: str, chat: Chat, variables: Mapping[str, Any]) -> str:
    """The conversation as transformers writes it. Raises NotTakenError if it cannot."""
    messages = [
        with_names_of_reasoning(message) for message in json.loads(json.dumps(chat.messages))
    ]
    final = messages[-1]["content"]
    if chat.is_begun:
        messages[-1]["content"] = final + TAG
    try:
        text = compiled(source).render(
            messages=messages,
            tools=list(chat.tools) or None,
            documents=None,
            add_generation_prompt=chat.add_generation_prompt and not chat.is_begun,
            **variables,
        )
    except Exception as error:  # a template may do anything with what it is given
        raise NotTakenError(str(error)) from error
    if not chat.is_begun:
        return text
    if final.strip() not in text or TAG.strip() not in text:
        raise NotTakenError("the final message is not there")
    end = text.rindex(TAG.strip())
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


# -- conversations -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    is_begun: bool = False


def user(content: str | list[Json]) -> Json:
    return {"role": "user", "content": content}


def system(content: str | list[Json]) -> Json:
    return {"role": "system", "content": content}


def assistant(content: str | list[Json], **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


def parts(*texts: str) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


def call(call_id: str, name: str, **arguments: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, name: str, content: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def tool(name: str, description: str, properties: Json, required: list[str] | None = None) -> Json:
    parameters: Json = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


DAYS = {"type": "integer", "description": "How many days", "minimum": 1, "maximum": 14}
PROPERTIES = {
    "city": {"type": "string", "description": "A city"},
    "days": DAYS,
    "unit": {"type": "string", "enum": ["c", "f"]},
}
TOOLS = (
    tool("get_weather", "Tells the weather.", PROPERTIES, ["city"]),
    tool("now", "Tells the time.", {}),
)
BRIEF, ASKED = system("You are Sieglinde."), user("How is the weather in Tromsø?")
WEATHER, NOW = call("abcdefgh1", "get_weather", city="Tromsø", days=2), call("abcdefgh2", "now")
SNOW, NOON = result("abcdefgh1", "get_weather", "snow, -7"), result("abcdefgh2", "now", "noon")
ANY_TEXT = (" a <b> & {x} 'q' \"é\" \n", '  Zwölf\n\n"Boxkämpfer" <|x|> \n')
CALLED = assistant("", tool_calls=[WEATHER])
SNOWS, THANKS = assistant("It snows."), user("Thanks")
CHATS = {
    "user": Chat([user("Hi")]),
    "system": Chat([BRIEF, ASKED]),
    "turns": Chat([BRIEF, ASKED, SNOWS, user("And there?"), assistant("Rain."), THANKS]),
    "any-text": Chat([system(ANY_TEXT[0]), user(ANY_TEXT[1])]),
    "parts": Chat([BRIEF, user(parts("One.", "Two."))]),
    "parts-of-all": Chat([
        system(parts("You are", " Sieglinde.")), user(parts("One.")), assistant(parts("A", "B")),
        user(parts("Two.", "Three.")),
    ]),
    "thoughts": Chat([ASKED, assistant("Snow.", reasoning_content="It is winter."), user("Thanks")]),
    "off": Chat([BRIEF, ASKED], variables={"enable_thinking": False}),
    "on": Chat([BRIEF, ASKED], variables={"enable_thinking": True}),
    "effort": Chat([BRIEF, ASKED], variables={"reasoning_effort": "low"}),
    "tools": Chat([ASKED], TOOLS),
    "tools-system": Chat([BRIEF, ASKED, assistant("Snow."), user("Sure?")], TOOLS),
    "call": Chat([BRIEF, ASKED, CALLED, SNOW], TOOLS),
    "call-beside": Chat([ASKED, CALLED | {"content": "I look."}, SNOW, SNOWS, THANKS], TOOLS),
    "calls": Chat([ASKED, assistant("", tool_calls=[WEATHER, NOW]), SNOW, NOON], TOOLS),
    "call-thought": Chat([ASKED, CALLED | {"reasoning_content": "A question of weather."}, SNOW], TOOLS),
    "call-bare": Chat([ASKED, assistant("", tool_calls=[NOW]), NOON, assistant("Noon."), THANKS], TOOLS),
    "late-system": Chat([BRIEF, ASKED, assistant("Snow."), system("Be brief."), user("Thanks")]),
    "two-users": Chat([BRIEF, ASKED, user("And there?")]),
    "whole": Chat([BRIEF, ASKED, assistant("Snow.")], add_generation_prompt=False),
    "begun": Chat([BRIEF, ASKED, assistant("There is")], is_begun=True),
    "begun-tools": Chat([BRIEF, ASKED, CALLED, SNOW, assistant("There is ")], TOOLS, is_begun=True),
}  # fmt: skip
"""The conversations, by what is special about them."""

# -- differences ------------------------------------------------------------------------------------

WITH_CALLS = ("call", "call-beside", "calls", "call-thought", "call-bare", "begun-tools")
WITH_TOOLS = ("tools", "tools-system", *WITH_CALLS)
MEANT: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (
        "It has no tools, so that the generic format describes them.",
        WITH_TOOLS,
        (
            "HuggingFaceTB-SmolLM3-3B",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            "deepseek-ai-DeepSeek-V3.1",
            "llama-cpp-rwkv-world",
            "microsoft-Phi-3.5-mini-instruct",
        ),
    ),
    ("It has neither tools nor a system message.", ("tools",), ("google-gemma-2-2b-it",)),
    (
        "Its `safe` makes HTML of what is around it: `&#34;`.",
        WITH_TOOLS,
        ("meetkai-functionary-medium-v3.1",),
    ),
    (
        "It leaves out earlier calls.",
        WITH_CALLS,
        ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"),
    ),
    (
        "It leaves out the text beside a call, which becomes a turn of its own.",
        ("call-beside",),
        (
            "Cohere2MoE",
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "MiniMax-M1",
            "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "muse-glimmer",
            "openai-gpt-oss-120b",
            "upstage-Solar-Open-100B",
        ),
    ),
    (
        "It writes the first call only: each becomes a turn of its own.",
        ("calls",),
        ("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "openai-gpt-oss-120b"),
    ),
    (
        "It leaves out a late system message, or puts it in front: it is the user's where it stands.",
        ("late-system",),
        (
            "Bielik-11B-v3.0-Instruct",
            "HuggingFaceTB-SmolLM3-3B",
            "MiniMax-M1",
            "MiniMax-M2",
            "MiniMax-M3",
            "NVIDIA-Nemotron-Nano-v2",
            "Reka-Edge",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            "deepseek-ai-DeepSeek-V3.1",
            "deepseek-ai-DeepSeek-V3.2",
            "deepseek-ai-DeepSeek-V4",
            "deepseek-ai-DeepSeek-V4-Flash-0731",
            "llama-cpp-deepseek-r1",
            "llama-cpp-rwkv-world",
            "openai-gpt-oss-120b",
            "tencent-Hy3",
            "upstage-Solar-Open-100B",
        ),
    ),
    (
        "It prints lists of parts as Python or JSON have them, or leaves them out.",
        ("parts",),
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "GigaChat3-10B-A1.8B",
            "GigaChat3.1-10B-A1.8B",
            "HuggingFaceTB-SmolLM3-3B",
            "LFM2-8B-A1B",
            "LFM2.5-Instruct",
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "deepseek-ai-DeepSeek-V4",
            "deepseek-ai-DeepSeek-V4-Flash-0731",
            "llama-cpp-rwkv-world",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "openbmb-MiniCPM5-1B",
            "poolside-Laguna-S-2.1",
            "poolside-Laguna-XS-2.1",
            "poolside-Laguna-XS.2",
        ),
    ),
    (
        "It prints such lists, or writes the first part only.",
        ("parts-of-all",),
        (
            "Apriel-1.6-15b-Thinker-fixed",
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "GigaChat3-10B-A1.8B",
            "GigaChat3.1-10B-A1.8B",
            "MiniMax-M1",
            "Mistral-Small-3.2-24B-Instruct-2506",
            "google-gemma-4-31B-it",
            "google-gemma-4-31B-it-interleaved",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "unsloth-Apriel-1.5",
            "unsloth-mistral-Devstral-Small-2507",
        ),
    ),
    (
        "Reasoning goes where it reads it: into a part of the content.",
        ("thoughts", "call-thought"),
        ("mistralai-Ministral-3-14B-Reasoning-2512",),
    ),
    ("Its name of reasoning is `reasoning`.", ("call-thought",), ("upstage-Solar-Open-100B",)),
    (
        "It puts the text of an answer that is begun into a thought.",
        ("begun", "begun-tools"),
        ("NVIDIA-Nemotron-Nano-v2",),
    ),
]  # fmt: skip
"""Why a template's text is meant to be another one than in transformers, and of which conversations."""


def variables_of(tokenizer: Tokenizer, chat: Chat) -> Json:
    """The variables that the reference gets. Models think unless asked not to, and know today's date, as at
    llama-server."""
    names = tokenizer._template.names
    given: Json = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    if "enable_thinking" in names and tokenizer.thinks:
        given["enable_thinking"] = True
    dates = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
    given |= {name: datetime.now().strftime(dates[name]) for name in dates.keys() & names}
    return given | dict(chat.variables)


def written(tokenizer: Tokenizer, chat: Chat) -> str:
    """The text of the prompt for such a request, as clients send it."""
    messages = json.loads(json.dumps(chat.messages))
    for one in (one for message in messages for one in message.get("tool_calls", ())):
        one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    body: Json = {"messages": messages, "tools": list(chat.tools)}
    body["chat_template_kwargs"] = dict(chat.variables)
    if not chat.is_begun:
        body |= {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": False,
        }
    request = ChatCompletionRequest.model_validate(body)
    return preparation.chat_text(ModelInfo("m", 10**6, tokenizer), request)


def test_all_conversations_are_here() -> None:
    assert len(TEMPLATES) >= 70
    assert len(CHATS) == 22


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_write_as_in_transformers(path: Path) -> None:
    source = path.read_text()
    tokenizer = Tokenizer(BUILTIN_MODEL, chat_template=source)
    meant = {name for _, names, stems in MEANT if path.stem in stems for name in names}
    differ: dict[str, tuple[str, str]] = {}
    for name, chat in CHATS.items():
        ours = written(tokenizer, chat)  # takes all of them
        try:
            theirs = reference(source, chat, variables_of(tokenizer, chat))
        except NotTakenError:
            meant.discard(name)
            continue
        if ours != theirs:
            differ[name] = theirs, ours
    unmeant = {name: differ[name] for name in differ if name not in meant}
    assert unmeant == {}
    assert meant == differ.keys()
