"""Qwen3-Coder's format of tool calls, also Qwen3.5's, Nemotron 3's and Step 3.5's.

Tags for the function and for each parameter between `<tool_call>` and `</tool_call>`, with values that are
JSON or, for strings, plain text.

Source: the chat template of Qwen3-Coder, and its `qwen3coder_tool_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.errors import InvalidRequestError
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import CallParser, Found, Function, ToolCall, call_of
from serve_app.prompt.tool_calls.schemas import (
    constants,
    properties_of,
    read_value,
    resolved,
    types_of,
)

MARKS = OPEN, CLOSE = "<tool_call>", "</tool_call>"

_BEGINNING = "<function="
_END = re.compile(r"</function>\s*</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class QwenCoderParser(CallParser):
    """Values are read by the schemas of the functions, as OpenAI describes these."""

    mark = OPEN

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}

    def _read(self, text: str) -> Found | None:
        begun = text.lstrip()
        if not begun.startswith(_BEGINNING):
            return None if _BEGINNING.startswith(begun) else ((), 0)
        end = _END.search(text)
        if end is None:
            return None
        call = self._parse(text[: end.start()])
        return ((call,) if call else ()), end.end()

    def _parse(self, text: str) -> ToolCall | None:
        function = _FUNCTION.match(text)
        if function is None:
            return None
        schema = self._schemas.get(function[1], {})
        inner = properties_of(schema)
        arguments = {}
        place = function.end()
        while found := _PARAMETER.match(text, place):
            name, value = found.groups()
            arguments[name] = read_value(value, inner.get(name), schema)
            place = found.end()
        return None if text[place:].strip() else call_of(function[1], arguments)


def rules(functions: Sequence[Function], mark: lark.Mark, parallel: bool) -> str:
    """See ToolFormat. Parameters are in the order of their schema."""
    bodies = [
        " ".join([lark.text(f"<function={function['name']}>\n"), *_parameters(function)])
        for function in functions
    ]
    more = f'("\\n" {mark(OPEN)} call)*' if parallel else ""
    return f"""calls: call {more}
call: "\\n" body "</function>\\n" {mark(CLOSE)}
{lark.one_of("body", bodies)}
free[suffix="\\n</parameter>\\n"]: /(.|\\n)*/"""


def _parameters(function: Function) -> list[str]:
    schema = function.get("parameters") or {}
    required = schema.get("required")
    found = []
    for name, inner in properties_of(schema).items():
        if not re.fullmatch(r"[^<>\n]+", name):
            raise InvalidRequestError(f"tools: no parameter can be called {name!r}.", "tools")
        opening = lark.text(f"<parameter={name}>\n")
        body = f"{opening} {_value(inner, schema)}"
        is_needed = isinstance(required, list) and name in required
        found.append(body if is_needed else f"({body})?")
    return found


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A value of this schema, and the tag that closes it."""
    closing = lark.text("\n</parameter>\n")
    types = types_of(schema, root)
    values = [one for one in constants(resolved(schema, root)) if isinstance(one, str)]
    if types == {"string"} and values:
        return f"({' | '.join(lark.text(value) for value in values)}) {closing}"
    if not types or "string" in types:
        return "free"
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{lark.value({**named, **schema})} {closing}"
