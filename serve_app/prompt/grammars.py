"""What a request wants its text to match, as an llguidance grammar: the form that the engine takes.

Every function raises InvalidRequestError that says where the fault is, and names `param`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from serve_app.errors import InvalidRequestError
from serve_app.prompt.tool_calls import HERMES_TAGS

MAX_CHARS = 65_536
"""Longest schema (as JSON), GBNF grammar or regular expression."""
MAX_DEPTH = 64
"""Deepest nesting of a schema."""

# Between a JSON text's tokens, as in llama.cpp: without a bound, a model can go on with blanks for ever.
_BLANKS = r" |\n{1,2}[ \t]{0,20}"


def from_json_schema(schema: Mapping[str, Any], param: str) -> str:
    """A JSON text that the schema validates."""
    text = _bounded(json.dumps(schema), param)
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"{param}: nested deeper than {MAX_DEPTH} levels.", param)
    overrides: Any = {"whitespace_pattern": _BLANKS, "lenient": False}
    return _checked(LLMatcher.grammar_from_json_schema(text, overrides=overrides), param)


def from_tool_calls(
    functions: Sequence[Mapping[str, Any]], *, parallel: bool, tags_are_tokens: bool, param: str
) -> str:
    """Calls of these functions in the Hermes format: one, and with `parallel` perhaps more. Tags that are
    tokens of their own are written otherwise in a grammar than those that are text."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema = {"anyOf": calls, "x-guidance": {"whitespace_pattern": _BLANKS}}
    text = _bounded(json.dumps(schema), param)
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"{param}: nested deeper than {MAX_DEPTH} levels.", param)
    opening, closing = (tag if tags_are_tokens else f'"{tag}"' for tag in HERMES_TAGS)
    more = r'("\n" call)*' if parallel else ""
    return _checked(
        LLMatcher.grammar_from_lark(
            f"""%llguidance {{}}
start: call {more}
call: {opening} "\\n" body "\\n" {closing}
body: %json {text}
"""
        ),
        param,
    )


def from_gbnf(text: str, param: str) -> str:
    """A text that llama.cpp's kind of grammar derives."""
    try:
        lark = gbnf_to_lark(_bounded(text, param))
    except Exception as error:  # it raises nothing narrower
        raise InvalidRequestError(f"{param}: no GBNF grammar: {error}", param) from error
    return _checked(LLMatcher.grammar_from_lark(lark), param)


def from_regex(text: str, param: str) -> str:
    """A text that the regular expression matches as a whole."""
    return _checked(LLMatcher.grammar_from_regex(_bounded(text, param)), param)


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"{param}: longer than {MAX_CHARS} characters.", param)
    return text


def _depth(value: object) -> int:
    """Levels of lists and objects, without recursion: callers send what they like."""
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, Mapping | list)
        for inner in (outer.values() if isinstance(outer, Mapping) else outer)
    ]:
        depth += 1
    return depth


def _checked(grammar: str, param: str) -> str:
    fault = LLMatcher.validate_grammar(grammar)
    if fault:
        raise InvalidRequestError(f"{param}: {fault.strip()}", param)
    return grammar
