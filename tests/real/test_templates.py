"""Chat templates in llama.cpp's source: each renders an agent's conversation, and its calls are read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.kernels.llama.model import Model
from serve_app.prompt import grammars
from serve_app.prompt.conversation import PastCall, Turn
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import GENERIC, ToolCall
from serve_app.prompt.tool_calls.calls import Reasoning
from tests.real.models import LLAMA_CPP, smollm2

TEMPLATES = sorted((LLAMA_CPP / "models/templates").glob("*.jinja"))
ARGUMENTS = {"city": "Tromsø", "days": 2}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "integer", "description": "How many days"},
                },
                "required": ["city", "days"],
            },
        },
    }
]
CALL = PastCall("get_weather", json.dumps(ARGUMENTS, ensure_ascii=False), "abcdefgh1")
ASKED = [Turn("system", ("You are Sieglinde.",)), Turn("user", ("How is the weather?",))]
CALLED = Turn("assistant", ("I look.",), reasoning="It is a question of weather.", calls=(CALL,))
ANSWERED = [Turn("tool", ("snow, -7 degrees",), call_id="abcdefgh1", name="get_weather")]
AFTER = [
    Turn("assistant", ("It snows.",), reasoning="The result says snow."),
    Turn("user", ("And there?",)),
    Turn("user", ("I mean Bodø.",)),
]


def test_all_templates_are_here() -> None:
    assert len(TEMPLATES) >= 60


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    path: Path = request.param
    return Tokenizer(smollm2(), chat_template=path.read_text())


def test_a_conversation_is_rendered_whole(tokenizer: Tokenizer) -> None:
    conversation = [*ASKED, CALLED, *ANSWERED, *AFTER]
    text = str(tokenizer.render_chat(conversation, TOOLS))
    assert "You are Sieglinde." in text  # wherever: Mistral's templates put it before the last user
    places = [text.find(part) for part in ("How is the weather?", "snow, -7", "It snows.")]
    places += [text.rfind("And there?"), text.rfind("I mean Bodø.")]
    assert -1 not in places
    assert places == sorted(places)
    assert "get_weather" in text
    if tokenizer.template_caps.tool_calls:
        assert "Tromsø" in text or "Troms\\u00f8" in text


def test_what_a_template_writes_is_read_and_may_be_written(tokenizer: Tokenizer) -> None:
    """The assistant's turn, as a template writes it into the next prompt, is read as it was, and the
    grammars of calls take it."""
    form = tokenizer.tool_format
    if form is GENERIC or not tokenizer.template_caps.tool_calls:
        pytest.skip("shows no calls")
    asked = str(tokenizer.render_chat(ASKED, TOOLS))
    beside = tokenizer.template_caps.calls_beside_content
    called = CALLED if beside else replace(CALLED, parts=(), reasoning="")
    whole = str(tokenizer.render_chat([*ASKED, called, *ANSWERED], TOOLS))
    pairs = enumerate(zip(asked, whole, strict=False))
    n_same = next((place for place, (ours, theirs) in pairs if ours != theirs), len(asked))
    tag = whole.rfind("<", 0, n_same)
    n_same = n_same if ">" in whole[tag:n_same] else tag  # both may go on with a tag
    parser = tokenizer.output_parser(tokenizer.encode(whole[:n_same]), TOOLS)
    parts = [*parser.feed(whole[n_same:]), *parser.finish()]
    (call,) = (part for part in parts if isinstance(part, ToolCall))
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    if tokenizer.template_caps.preserve_reasoning and tokenizer.thinks:
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        assert reasoning.strip() == called.reasoning
    if form.opening is None or form.has_channels:
        return
    written = whole[whole.index(form.opening, n_same) :].replace("\\u00f8", "ø")
    written = re.sub(', "id": "abcdefgh1"|\\[CALL_ID\\]abcdefgh1', "", written)  # need not be there
    grammar = grammars.from_tool_calls(
        [TOOLS[0]["function"]], Dialect(form), forced=True, parallel=False, param="tools"
    )
    assert ends(tokenizer.model, grammar, written)
    assert not ends(tokenizer.model, grammar, written.replace("get_weather", "get_whether"))


def ends(model: Model, grammar: str, text: str) -> bool:
    """Whether the grammar takes so much of the text that it takes nothing more."""
    constraint = model.constraint(grammar)
    for character in text:  # one by one: a token may have the last one of the call, and others
        if constraint.complete:
            return True
        tokens = model.tokenize(character, add_special=False, parse_special=False)
        if not all(map(constraint.take, tokens)):
            return False
    return constraint.complete
