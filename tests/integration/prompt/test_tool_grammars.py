"""Calls that a grammar makes, in every format, from a model that would say something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve_app.base.errors import InvalidRequestError
from serve_app.engine import Engine, EngineOptions, FinishReason, GenerationRequest, SamplingParams
from serve_app.kernels.llama.model import Model
from serve_app.prompt import grammars, output_parser
from serve_app.prompt.conversation import Turn
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import ToolCall, ToolFormat
from serve_app.prompt.tool_calls.format import ThinkingPhase
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.unit.prompt.tool_calls.formats import (
    EXAMPLE_FUNCTIONS,
    EXAMPLES,
    FORMAT,
    TEMPLATES,
    every_format,
    template_at,
)

TOKENIZER = Tokenizer(BUILTIN_MODEL)
MODEL = Model(BUILTIN_MODEL, vocab_only=True)
PROMPT = TOKENIZER.encode_chat([Turn("user", ("Name three fruits.",))])
(IM_START,) = TOKENIZER.tokenize("<|im_start|>", False, True)
(IM_END,) = TOKENIZER.tokenize("<|im_end|>", False, True)

CONTENT = {
    "harmony": "<|channel|>final<|message|>",
    "recipients": "all\n",
    "muse": " to=user<|message|>",
}
"""What comes before content that a grammar holds."""
NOT_OF_CALLS = ("think", "THINK", "RESPONSE", "<|channel>", "<channel|>")

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["days", "unit", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": PLACE},
    {"name": "now", "description": "é"},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def no_token(text: str) -> int | None:
    return None


def delimiters_as_tokens(text: str) -> int | None:
    """As if the calls' delimiters were control tokens, all the same: the other ones end a text. What is
    around reasoning and content are texts, or they could not be told from calls."""
    return None if any(one in text for one in NOT_OF_CALLS) else IM_START


def grammar_of(form: ToolFormat, *, forced: bool, parallel: bool) -> str:
    return grammars.from_tool_calls(
        FUNCTIONS, Dialect(form, no_token), forced=forced, parallel=parallel, param="tools"
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(
        n_slots=8, n_ctx_slot=1024, threads=1, n_batch=256, max_waiting=64, profile_limit_s=0
    )
    engine = Engine.load(BUILTIN_MODEL, options)
    yield engine
    engine.close(0)


async def say(engine: Engine, grammar: str, seed: int) -> tuple[str, FinishReason]:
    params = SamplingParams(grammar=grammar, max_tokens=400, seed=seed, temperature=1.5)
    text, end = "", None
    async for delta in engine.submit(GenerationRequest(f"s{seed}", PROMPT, params)):
        text, end = text + delta.text, delta.end
    assert end is not None
    return text, end.reason


def calls_in(form: ToolFormat, text: str) -> list[ToolCall]:
    parser = form.parser(TOOLS)
    parts = [*parser.feed(text), *parser.finish()]
    assert all(isinstance(part, ToolCall) for part in parts), text
    return [part for part in parts if isinstance(part, ToolCall)]


@every_format
@pytest.mark.parametrize("parallel", [False, True])
async def test_forced_calls_validate(engine: Engine, form: ToolFormat, parallel: bool) -> None:
    grammar = grammar_of(form, forced=True, parallel=parallel)
    said = await asyncio.gather(*(say(engine, grammar, seed) for seed in range(4)))
    # A string may go on for ever, and so may calls. This model never writes the long ends of some strings.
    ended = [text for text, reason in said if reason is FinishReason.STOP]
    assert ended or parallel or form.name in ("kimi-k3", "muse")
    for text in ended:
        calls = calls_in(form, text)
        assert len(calls) == 1 or parallel
        for call in calls:
            arguments = json.loads(call.arguments)
            schema = PLACE if call.name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(arguments, schema)


def takes(grammar: str, text: str) -> tuple[bool, bool]:
    """Whether the grammar takes the text, and whether it may end there."""
    constraint = MODEL.constraint(grammar)
    for token in MODEL.tokenize(text, add_special=False, parse_special=True):
        if not constraint.take(token):
            return False, False
    return True, constraint.complete or any(map(constraint.take, MODEL.eog_tokens))


def with_tokens(form: ToolFormat, text: str) -> str:
    for delimiter in form.delimiters:
        if delimiters_as_tokens(delimiter) is not None:
            text = text.replace(delimiter, "<|im_start|>")
    return text


@every_format
@pytest.mark.parametrize("as_tokens", [False, True])
def test_calls_after_any_text(form: ToolFormat, as_tokens: bool) -> None:
    """Text is free up to the opening, and what is behind it is not."""

    def written(text: str) -> str:
        return with_tokens(form, text) if as_tokens else text

    def delimiter_token(text: str) -> int | None:
        return delimiters_as_tokens(text) if as_tokens and text in form.delimiters else None

    single, several = (
        grammars.from_tool_calls(
            EXAMPLE_FUNCTIONS,
            Dialect(form, delimiter_token),
            forced=False,
            parallel=parallel,
            param="tools",
        )
        for parallel in (False, True)
    )
    first, now = written(EXAMPLES[form.name].first), written(EXAMPLES[form.name].second)
    said = CONTENT.get(form.name, "") if form.name in ("recipients", "muse") else ""
    for grammar in (single, several):
        assert takes(grammar, written(f"{said}Hello <tool, [TOOL] and {{ }}.")) == (True, True)
        assert takes(grammar, first) == (True, True)
        assert takes(grammar, now) == (True, True)
        assert takes(grammar, now.replace("now", "then")) == (False, False)
        assert not takes(grammar, now[:-1])[1]
        if form.opening is not None:
            assert takes(grammar, f"Well.\n{now}") == (True, True)
    assert takes(single, f"{now} More.") == (False, False)
    example = EXAMPLES[form.name]
    if example.both is not None:
        both = written(example.both)
        assert takes(single, both) == (False, False)
        assert takes(several, both) == (True, True)


@pytest.mark.parametrize("form", FORMAT.values(), ids=FORMAT.keys())
def test_calls_or_an_answer_that_a_schema_validates(form: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
    grammar = grammars.from_tool_calls(
        EXAMPLE_FUNCTIONS,
        Dialect(form, no_token),
        forced=False,
        parallel=False,
        param="tools",
        answer=schema,
    )
    header = CONTENT.get(form.name, "")
    assert takes(grammar, EXAMPLES[form.name].first) == (True, True)
    assert takes(grammar, header + '{"mood": "glad"}') == (True, True)
    assert takes(grammar, header + '{"mood": 7}') == (False, False)
    assert takes(grammar, header + "Glad.") == (False, False)


@pytest.mark.parametrize(
    ("form", "thought", "header"),
    [
        (
            FORMAT["harmony"],
            "<|channel|>analysis<|message|>Hm {}.<|end|><|start|>assistant",
            "<|channel|>final<|message|>",
        ),
        (FORMAT["gemma"], "<|channel>thought\nHm {}.<channel|>", ""),
        (FORMAT["command-r"], "<|START_THINKING|>Hm {}.<|END_THINKING|>", "<|START_RESPONSE|>"),
        (FORMAT["solar"], "<|think|>Hm {}.<|end|><|begin|>assistant", "<|content|>"),
        (
            FORMAT["kimi-k3"],
            "<|open|>think<|sep|>Hm {}.<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
        ),
    ],
    ids=["harmony", "gemma", "command-r", "solar", "kimi-k3"],
)
def test_reasoning_on_a_channel_comes_before_a_schemas_text(
    form: ToolFormat, thought: str, header: str
) -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
    grammar = grammars.from_json_schema(schema, "json_schema", Dialect(form, no_token))
    assert takes(grammar, thought + header + '{"mood": "glad"}') == (True, True)
    assert takes(grammar, header + '{"mood": "glad"}') == (True, True)
    assert takes(grammar, thought + header + "Glad.") == (False, False)
    off = Dialect(form, no_token, ThinkingPhase.OFF)
    held = grammars.from_json_schema(schema, "json_schema", off)
    assert takes(held, header + '{"mood": "glad"}') == (True, True)
    assert takes(held, thought + header + '{"mood": "glad"}') == (False, False)
    behind = Dialect(form, no_token, ThinkingPhase.BEHIND)  # the prompt has the header
    held = grammars.from_json_schema(schema, "json_schema", behind)
    assert takes(held, '{"mood": "glad"}') == (True, True)


def test_reasoning_tags_that_are_tokens_come_before_calls() -> None:
    call = EXAMPLES["hermes"].second
    tokens = {output_parser.THINK.open: IM_START, output_parser.THINK.close: IM_START}
    grammar = grammars.from_tool_calls(
        FUNCTIONS,
        Dialect(FORMAT["hermes"], tokens.get),
        forced=False,
        parallel=False,
        param="tools",
    )
    reasoning = "<|im_start|>\nHm.\n<|im_start|>\n\n"
    assert takes(grammar, "Yes.") == (True, True)
    assert takes(grammar, f"{reasoning}Yes.") == (True, True)
    assert takes(grammar, reasoning.removeprefix("<|im_start|>") + call) == (True, True)
    assert takes(grammar, f"{reasoning}{call}") == (True, True)
    assert takes(grammar, f"{reasoning}{call}".replace("now", "then")) == (False, False)


@pytest.mark.parametrize(("version", "has_line_ends"), [("4.6", True), ("4.7-flash", False)])
def test_glm_calls_have_the_line_ends_of_their_template(version: str, has_line_ends: bool) -> None:
    (path,) = (path for path in TEMPLATES if path.stem == f"glm-{version}")
    grammar = grammars.from_tool_calls(
        EXAMPLE_FUNCTIONS,
        Dialect(template_at(path).tool_format, no_token),
        forced=True,
        parallel=True,
        param="tools",
    )
    text = EXAMPLES["glm"].first
    with_line_ends = text.replace("><arg", ">\n<arg").replace("r<arg", "r\n<arg")
    assert with_line_ends.count("\n") == 4
    with_line_ends = with_line_ends.replace("</tool", "\n</tool")
    assert takes(grammar, with_line_ends)[1] is has_line_ends
    assert takes(grammar, text)[1] is not has_line_ends


ARRAY = {"type": "array"}


def test_a_string_parameter_is_free_text() -> None:
    function = {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": ARRAY}}}
    grammar = grammars.from_tool_calls(
        [function],
        Dialect(FORMAT["qwen-coder"], no_token),
        forced=True,
        parallel=False,
        param="tools",
    )
    text = "<tool_call>\n<function=f>\n<parameter=s>\na\n\n</parameter>é\n</parameter>\n"
    assert takes(grammar, f"{text}</function>\n</tool_call>") == (True, True)
    assert takes(grammar, f"{text}<parameter=n>\n[1]\n</parameter>\n</function>\n</tool_call>")[1]
    assert takes(grammar, f"{text}<parameter=n>\n[1\n</parameter>") == (False, False)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["Oslo", "null"], []),
        ({"$ref": "#/$defs/unit"}, ["C"], ["K", '"C"']),
        ({"allOf": [{"$ref": "#/$defs/unit"}]}, ["F"], ["K"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["12", "null"], ["x"]),
        ({"enum": [1, 2]}, ["1"], ["3"]),
        ({}, ["x", "1"], []),
        ({"$ref": "#/$defs/circle"}, ["x"], []),
        ({"type": "string", "enum": [{"x": 1}, "x"]}, ["x"], ["y"]),
        ({"type": "string", "enum": 1}, ["x"], []),
    ],
)
def test_values_of_parameters(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    named = {"unit": {"type": "string", "enum": ["C", "F"]}, "circle": {"$ref": "#/$defs/circle"}}
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": named}
    grammar = grammars.from_tool_calls(
        [{"name": "f", "parameters": parameters}],
        Dialect(FORMAT["qwen-coder"], no_token),
        forced=True,
        parallel=False,
        param="tools",
    )
    for value, expected in [*((one, True) for one in taken), *((one, False) for one in refused)]:
        body = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        assert takes(grammar, f"<tool_call>\n{body}\n</tool_call>")[0] is expected, value


def test_a_function_without_properties_takes_none() -> None:
    function = {"name": "now", "parameters": {"properties": [], "required": 1, "type": []}}
    grammar = grammars.from_tool_calls(
        [function],
        Dialect(FORMAT["qwen-coder"], no_token),
        forced=True,
        parallel=False,
        param="tools",
    )
    assert takes(grammar, EXAMPLES["qwen-coder"].second) == (True, True)


@pytest.mark.parametrize(
    ("parameters", "loosened", "text"),
    [
        ({"a": {"type": "integer", "minimum": "x"}}, ["properties.a.minimum"], "a>\n7\n"),
        ({"a": {"type": "no type"}}, ["properties.a.type"], "a>\nany text\n"),
        ({"a": {"type": "array", "minItems": 2, "maxItems": 1}}, ["properties.a.minItems"], "a>\n[]\n"),
        ({"a": {"type": "string"}, "b>": {}}, ["properties.b>"], "a>\nany text\n"),
        ({"a": {"$ref": "#/nowhere"}}, ["properties.a.$ref"], "a>\nany text\n"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_hold_is_loosened(
    parameters: dict[str, Any], loosened: list[str], text: str
) -> None:
    names: list[str] = []
    grammar = grammars.from_tool_calls(
        [{"name": "f", "parameters": {"properties": parameters, "required": list(parameters)}}],
        Dialect(FORMAT["qwen-coder"], no_token),
        forced=True,
        parallel=False,
        param="tools",
        loosened=names.extend,
    )
    assert names == [f"tools.f.parameters.{path}" for path in loosened]
    call = f"<tool_call>\n<function=f>\n<parameter={text}</parameter>\n</function>\n</tool_call>"
    assert takes(grammar, call) == (True, True)


def test_a_strict_function_that_is_wrong_is_named() -> None:
    parameters = {"properties": {"a": {"items": {"type": "nothing"}}}}
    with pytest.raises(InvalidRequestError) as raised:
        grammars.from_tool_calls(
            [{"name": "f", "parameters": parameters, "strict": True}],
            Dialect(FORMAT["qwen-coder"], no_token),
            forced=True,
            parallel=False,
            param="tools",
        )
    message = "tools: the function 'f': properties.a.items.type: \"nothing\" is no type of JSON"
    assert (raised.value.message, raised.value.param) == (message, "tools")


# -- delimiters that are control tokens -----------------------------------------------------------


def test_delimiters_of_the_template_are_shown() -> None:
    """The built-in model has no such delimiters: others of its control tokens stand for them."""
    assert MODEL.piece(IM_START) == b""
    model = Model(BUILTIN_MODEL, vocab_only=True, delimiters=lambda _: ["<|im_start|>"])
    assert model.piece(IM_START) == b"<|im_start|>"
    assert model.detokenize([IM_START, IM_END]) == "<|im_start|>"


def test_reasoning_that_the_template_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }}|{% if quick is not defined %}<think>\n{% endif %}"
    monkeypatch.setattr(Model, "chat_template", property(lambda self: template))
    tokenizer = Tokenizer(BUILTIN_MODEL)
    messages = [Turn("user", ("Hi",))]
    thinking = tokenizer.encode_chat(messages)
    assert tokenizer.decode(thinking, special=True) == "Hi|<think>\n"
    assert tokenizer.output_parser(thinking).feed("Hm") == [output_parser.Reasoning("Hm")]
    ended = tokenizer.encode_chat(messages, thinks=False)
    assert tokenizer.decode(ended, special=True) == "Hi|<think>\n\n</think>\n\n"
    assert tokenizer.output_parser(ended).feed("Hm") == ["Hm"]
    quick = tokenizer.encode_chat(messages, (), {"quick": True}, False)
    assert tokenizer.decode(quick, special=True) == "Hi|"
    with pytest.raises(InvalidRequestError, match="'messages'"):
        tokenizer.encode_chat(messages, (), {"messages": []})
