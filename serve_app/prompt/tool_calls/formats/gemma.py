"""Gemma 4's format of tool calls: `<|tool_call>call:`, a name, arguments in braces, `<tool_call|>`.

Arguments are like JSON, with bare keys and with strings between two `<|"|>`. Reasoning is between
`<|channel>thought` and `<channel|>`.

Source: Google's guide to the prompt format of Gemma 4, and the model's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.channels import ChannelParser, thought_rules
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader, decode
from serve_app.prompt.tool_calls.schemas import constants, properties_of, resolved, types_of

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_THOUGHT = ("<|channel>", "<channel|>")
_CALL = "call:"
_NAME, _KEY = re.compile(r"[\w.-]*"), re.compile(r"[^:{}\[\],<]*")
_SCALAR = re.compile(r"[-+.\w]*")
_MOST_DEPTH = 32


class GemmaParser(ChannelParser):
    """Keys may be strings, too."""

    opening = OPEN
    thought = _THOUGHT
    dropped = ()
    thought_header = re.compile(r"\w*")

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.one_of(_CALL)
        call = TaggedCall((yield from text.run(_NAME)))
        yield from text.one_of("{")
        while (key := (yield from _next_key(text, is_first=not call.arguments))) is not None:
            self._argument(call, key, (yield from _value(text, 0)))
        yield from text.one_of(CLOSE)
        return self._tagged_call(call)


def _next_key(text: TextReader, *, is_first: bool) -> Reading[str | None]:
    """The next key of an object; None behind its last value."""
    yield from text.run(BLANKS)
    if is_first and (yield from text.peek()) != "}":
        return (yield from _read_key(text))
    if (yield from text.one_of(",", "}")) == "}":
        return None
    yield from text.run(BLANKS)
    return (yield from _read_key(text))


def _read_key(text: TextReader) -> Reading[str]:
    if (yield from text.peek()) == QUOTE[0]:
        yield from text.one_of(QUOTE)
        key = yield from text.until(QUOTE)
    else:
        key = (yield from text.run(_KEY)).strip()
    yield from text.run(BLANKS)
    yield from text.one_of(":")
    return key


def _value(text: TextReader, depth: int) -> Reading[object]:
    yield from text.run(BLANKS)
    first = yield from text.peek()
    if depth == _MOST_DEPTH:
        raise NoCallError
    if first == QUOTE[0]:
        yield from text.one_of(QUOTE)
        return (yield from text.until(QUOTE))
    if first == "{":
        return (yield from _object(text, depth))
    if first == "[":
        return (yield from _list(text, depth))
    return decode((yield from text.run(_SCALAR)))


def _object(text: TextReader, depth: int) -> Reading[object]:
    members: dict[str, object] = {}
    yield from text.one_of("{")
    while (key := (yield from _next_key(text, is_first=not members))) is not None:
        members[key] = yield from _value(text, depth + 1)
    return members


def _list(text: TextReader, depth: int) -> Reading[object]:
    items: list[object] = []
    yield from text.one_of("[")
    yield from text.run(BLANKS)
    if (yield from text.peek()) == "]":
        yield from text.one_of("]")
        return items
    while True:
        items.append((yield from _value(text, depth + 1)))
        yield from text.run(BLANKS)
        if (yield from text.one_of(",", "]")) == "]":
            return items


# -- grammar --------------------------------------------------------------------------------------


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """Parameters are in the order in which the template tells them, by name."""
    written = _Written(delimiter)
    schemas = [function.get("parameters") or {} for function in functions]
    bodies = [
        f"{lark.text(function['name'])} {written.object_of(schema, schema, 0)}"
        for function, schema in zip(functions, schemas, strict=True)
    ]
    more = f"({delimiter(OPEN)} call)*" if parallel else ""
    lazy = "[lazy]" if written.quote.startswith('"') else ""
    return "\n".join(
        [
            f"calls: call {more}",
            f"call: {lark.text(_CALL)} body {delimiter(CLOSE)}",
            lark.one_of("body", bodies),
            *written.rules,
            f"""value: string | object | list | NUMBER | "true" | "false" | "null"
string: {written.quote} string_end
string_end{lazy}: /(.|\\n)*/ {written.quote}
object: "{{" (member ("," member)*)? "}}"
member: (KEY | string) ":" value
list: "[" (value ("," value)*)? "]"
KEY: /[\\w-]+/
NUMBER: /-?[0-9]+(\\.[0-9]+)?([eE][-+]?[0-9]+)?/""",
        ]
    )


class _Written:
    """The rules of values by their schemas, collected."""

    def __init__(self, delimiter: lark.Delimiter) -> None:
        self.quote = delimiter(QUOTE)
        self.rules: list[str] = []

    def object_of(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """The object, by a rule for each property, for what may come from there on before any other one,
        and one for what may come behind others."""
        needed, name = schema.get("required"), f"of_{len(self.rules)}"
        needed = needed if isinstance(needed, list) else []
        self.rules.append(f'{name}_end: ""')
        first = rest = f"{name}_end"
        for i, (key, inner) in enumerate(sorted(properties_of(schema).items(), reverse=True)):
            pair = f"{lark.text(key + ':')} {self._value(inner, root, depth + 1)} {rest}"
            others = ("", "") if key in needed else (f" | {first}", f" | {rest}")
            first, rest = f"{name}_first_{i}", f"{name}_rest_{i}"
            self.rules += [f"{first}: {pair}{others[0]}", f'{rest}: "," {pair}{others[1]}']
        return f'"{{" {first} "}}"'

    def _value(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        types, known = types_of(schema, root), resolved(schema, root)
        texts = [one for one in constants(known) if isinstance(one, str)]
        if depth > _MOST_DEPTH or not types:
            return "value"
        if texts:
            return f"{self.quote} ({' | '.join(map(lark.text, texts))}) {self.quote}"
        if types == {"object"} and properties_of(known):
            return self.object_of(known, root, depth)
        if types == {"array"} and "items" in known:
            item = self._value(known["items"], root, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        kinds = [_KINDS[one] for one in ("string", "object", "array") if one in types]
        if scalars := sorted(types.difference(_KINDS)):
            named = {key: root[key] for key in ("$defs", "definitions") if key in root}
            only = {**named, **schema} if not kinds else {"type": scalars}
            kinds.append(lark.value(only))
        return f"({' | '.join(kinds)})"


_KINDS = {"string": "string", "object": "object", "array": "list"}


def _said(delimiter: lark.Delimiter) -> str:
    """Reasoning may come first, and content before calls."""
    lazy = "[lazy]" if delimiter(OPEN).startswith('"') else ""
    return f"""start: thought* (TEXT | opened calls)
opened{lazy}: TEXT {delimiter(OPEN)}
{thought_rules(_THOUGHT, delimiter)}"""


def _held(delimiter: lark.Delimiter, has_calls: bool) -> str:
    calls = f"| {delimiter(OPEN)} calls" if has_calls else ""
    return f"start: thought* (answer {calls})\n{thought_rules(_THOUGHT, delimiter)}"


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with a description, which the template does not do without."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def _written(name: str, arguments: str) -> str:
    return f"{OPEN}{_CALL}{name}{{{arguments}}}{CLOSE}"


_FIRST, _SECOND = _written("get_weather", f"city:{QUOTE}Tromsø{QUOTE},days:2"), _written("now", "")

FORMAT = ToolFormat(
    name="gemma",
    template_patterns=(r"<\|tool_call>call:",),
    delimiters=(OPEN, CLOSE, QUOTE, *_THOUGHT),
    make_parser=GemmaParser,
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=_FIRST + _SECOND),
    opening=OPEN,
    said=_said,
    held=_held,
    unwritable=r"[:{}\[\],<]",
    has_channels=True,
    tool=_tool,
)
