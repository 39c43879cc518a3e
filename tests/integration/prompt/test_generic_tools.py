"""Calls of models whose chat templates have no tools, made by a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.kernels.llama.model import Model
from serve_app.prompt import grammars
from serve_app.prompt.conversation import Turn
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.output_parser import Part, Reasoning
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import GENERIC, CallPiece, ToolCall
from serve_app.prompt.tool_calls.format import ThinkingPhase
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.unit.prompt.tool_calls.formats import EXAMPLE_FUNCTIONS, EXAMPLES

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)
TEMPLATES = {"plain": PLAIN, "no system": NO_SYSTEM, "named": "zephyr"}
CITY = {"type": "string", "maxLength": 12}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
FUNCTIONS: list[dict[str, Any]] = [WEATHER, {"name": "now"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CHAT = [Turn("user", ("What is the weather in Oslo tomorrow?",))]
MODEL = Model(BUILTIN_MODEL, vocab_only=True)

every_template = pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(n_slots=2, n_ctx_slot=2048, threads=1, n_batch=256, profile_limit_s=0)
    engine = Engine.load(BUILTIN_MODEL, options)
    yield engine
    engine.close(0)


def grammar_of(
    tokenizer: Tokenizer, thinking: ThinkingPhase = ThinkingPhase.NEVER, **options: Any
) -> str:
    return grammars.from_tool_calls(
        EXAMPLE_FUNCTIONS,
        Dialect(tokenizer.tool_format, tokenizer.delimiter_token, thinking),
        **{"forced": True, "parallel": True, **options},
        param="tools",
    )


async def say(engine: Engine, tokenizer: Tokenizer, grammar: str, *, in_pieces: bool) -> list[Part]:
    prompt = tokenizer.encode_chat(CHAT, TOOLS)
    params = SamplingParams(grammar=grammar, max_tokens=400, temperature=0)
    parser = tokenizer.output_parser(prompt, TOOLS, in_pieces=in_pieces)
    parts: list[Part] = []
    request_id = f"{len(prompt)}-{len(grammar)}-{in_pieces}"
    async for delta in engine.submit(GenerationRequest(request_id, prompt, params)):
        parts += parser.feed(delta.text)
    return parts + parser.finish()


@every_template
async def test_a_forced_call_is_valid_whole_and_in_pieces(engine: Engine, source: str) -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, source)
    assert tokenizer.tool_format is GENERIC
    for functions in (FUNCTIONS[:1], FUNCTIONS[1:]):
        grammar = grammars.from_tool_calls(
            functions, Dialect(GENERIC), forced=True, parallel=False, param="tools"
        )
        (call,) = await say(engine, tokenizer, grammar, in_pieces=False)
        assert isinstance(call, ToolCall)
        assert call.name == functions[0]["name"]
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, functions[0].get("parameters", {"maxProperties": 0}))
        start, *rest = await say(engine, tokenizer, grammar, in_pieces=True)
        assert isinstance(start, CallPiece)
        assert start.name == call.name
        told = [start.arguments]
        for piece in rest:
            assert isinstance(piece, CallPiece)
            assert piece.name is None
            told.append(piece.arguments)
        assert json.loads("".join(told)) == arguments


@every_template
async def test_an_answer_is_a_call_or_a_text(engine: Engine, source: str) -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, source)
    grammar = grammar_of(tokenizer, forced=False)
    parts = await say(engine, tokenizer, grammar, in_pieces=True)
    assert len({type(part) for part in parts}) == 1
    assert not str(parts[0]).startswith("{")


@every_template
def test_the_prompt_describes_the_functions(source: str) -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, source)
    messages = [Turn("system", ("Be brief.",)), *CHAT]
    text = tokenizer.render_chat(messages, TOOLS)
    assert text.index("Be brief.") < text.index('"name": "get_weather"') < text.index("Oslo")
    assert "Oslo" in tokenizer.render_chat(CHAT)
    assert "function" not in tokenizer.render_chat(CHAT)


def test_control_tokens_in_descriptions_stay_text() -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, PLAIN)
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    plain, odd = tokenizer.encode_chat(CHAT, TOOLS), tokenizer.encode_chat(CHAT, tools)
    (end,) = tokenizer.tokenize("<|im_end|>", False, True)
    assert "<|im_end|>" in tokenizer.render_chat(CHAT, tools)
    assert odd.count(end) == plain.count(end)


PERHAPS = {"forced": False, "thinking": ThinkingPhase.PERHAPS}
BEGUN = {"forced": False, "thinking": ThinkingPhase.BEGUN}


def takes(grammar: str, text: str) -> tuple[bool, bool]:
    """Whether the grammar takes the text, and whether it may end there."""
    constraint = MODEL.constraint(grammar)
    for token in MODEL.tokenize(text, add_special=False, parse_special=True):
        if not constraint.take(token):
            return False, False
    return True, constraint.complete or any(map(constraint.take, MODEL.eog_tokens))


@pytest.mark.parametrize(
    ("options", "text", "taken"),
    [
        ({"forced": True}, EXAMPLES["generic"].first, True),
        ({"forced": True}, EXAMPLES["generic"].both, True),
        ({"forced": True, "parallel": False}, EXAMPLES["generic"].both, False),
        ({"forced": True}, '{"response": "Hi."}', False),
        ({"forced": False}, EXAMPLES["generic"].both, True),
        ({"forced": False}, '{"response": "Hi \\"you\\"."}', True),
        ({"forced": False}, "Hi.", False),
        ({"forced": False}, "<think>Hm.</think>" + EXAMPLES["generic"].first, False),
        (PERHAPS, "<think>{}</think>\n\n" + EXAMPLES["generic"].first, True),
        (PERHAPS, '<think>Hm.</think>{"response": ""}', True),
        (PERHAPS, '{"response": ""}', True),
        (PERHAPS, "Hm.</think>" + EXAMPLES["generic"].first, False),
        (BEGUN, "{Hm.</think>" + EXAMPLES["generic"].first, True),
        (BEGUN, "Hm.</think>\nWell", False),
    ],
)  # fmt: skip
def test_what_answers_may_be(options: dict[str, Any], text: str, taken: bool) -> None:
    assert takes(grammar_of(Tokenizer(BUILTIN_MODEL, PLAIN), **options), text) == (taken, taken)


def test_reasoning_comes_before_an_answer() -> None:
    tokenizer = Tokenizer(BUILTIN_MODEL, PLAIN + "<think>\n")
    parser = tokenizer.output_parser(tokenizer.encode_chat(CHAT, TOOLS), TOOLS)
    parts = [*parser.feed(f"Hm.\n</think>\n\n{EXAMPLES['generic'].second}"), *parser.finish()]
    assert parts == [Reasoning("Hm."), ToolCall("now", "{}")]
