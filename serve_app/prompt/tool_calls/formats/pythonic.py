"""Calls as Python writes them: a list of names with arguments in brackets.

Sources: Liquid AI's guide to tool use, and the chat templates of LFM2 and LFM2.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app.prompt.template_text import TemplateText
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader, decode

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME, _KEY, _WORD = re.compile(r"[\w.-]*"), re.compile(r"\w*"), re.compile(r"[\w.+-]*")
_JSON = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "\n": ""}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_HEX = {"u": 4, "x": 2}
_MOST_DEPTH = 64
_FREE = {"type", "title", "description", "default", "examples"}
"""The keywords of schemas that leave a text free."""


class PythonicParser(CallParser):
    """`[f(a='x', n=2), g()]`; the list may have JSON objects with `name` and `arguments`, too. A quotation
    mark ends a string only where one can end: LFM2.5's template escapes nothing."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        yield from text.delimiter("[")
        while True:
            is_json = (yield from text.after_blanks()) == "{"
            read = self._json_call(text, ("arguments",)) if is_json else self._python_call(text)
            called = yield from read
            if not called:
                raise NoCallError
            calls += called
            if (yield from text.delimiter(",", "]")) == "]":
                break
        yield from text.delimiter(CLOSE)
        return calls

    def _python_call(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        call = TaggedCall((yield from text.run(_NAME)))
        yield from text.delimiter("(")
        if (yield from text.after_blanks()) == ")":
            yield from text.one_of(")")
            return self._tagged_call(call)
        while True:
            yield from text.run(BLANKS)
            key = yield from text.run(_KEY)
            if not (key and call.name):
                raise NoCallError
            yield from text.delimiter("=")
            self._argument(call, key, decode((yield from _read_value(text))))
            if (yield from text.delimiter(",", ")")) == ")":
                return self._tagged_call(call)


def _read_value(text: TextReader) -> Reading[str]:
    """Reads a value, and returns it as JSON."""
    written: list[str] = []
    n_open = 0
    while True:
        first = yield from text.after_blanks()
        if first in "'\"":
            written.append(json.dumps((yield from _read_string(text)), ensure_ascii=False))
        elif first in "{}[]()":
            n_open += 1 if first in "{[(" else -1
            yield from text.one_of(first)
            written.append({"(": "[", ")": "]"}.get(first, first))
        elif first in ",:":
            written.append((yield from text.one_of(first)))
        else:
            word = yield from text.run(_WORD)
            written.append(_JSON.get(word, word))
            if not word:
                raise NoCallError
        if not 0 <= n_open <= _MOST_DEPTH:
            raise NoCallError
        if n_open == 0:
            return "".join(written)


def _read_string(text: TextReader) -> Reading[str]:
    quote = yield from text.peek()
    text.advance(text.at + 1)
    pieces: list[str] = []
    while True:
        pieces.append((yield from text.run(_PLAIN[quote])))
        is_quote = (yield from text.peek()) == quote
        text.advance(text.at + 1)
        if not is_quote:
            pieces.append((yield from _read_escape(text)))
            continue
        blanks = yield from text.run(BLANKS)
        if (yield from text.peek()) in ",)]}:":
            return "".join(pieces)
        pieces.append(quote + blanks)


def _read_escape(text: TextReader) -> Reading[str]:
    char = yield from text.peek()
    text.advance(text.at + 1)
    digits = ""
    for _ in range(_HEX.get(char, 0)):
        digits += yield from text.peek()
        text.advance(text.at + 1)
    if digits:
        is_hexadecimal = re.fullmatch("[0-9a-fA-F]+", digits)
        return chr(int(digits, 16)) if is_hexadecimal else f"\\{char}{digits}"
    return _ESCAPES.get(char, char if char in "'\"" else f"\\{char}")


def _pythonic_rules(
    functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool
) -> str:
    bodies, rules = [], list[str]()
    for i, function in enumerate(functions):
        schema = function.get("parameters") or {}
        required = schema.get("required")
        members = [
            (f"{lark.text(f'{name}=')} {_value(inner, schema)}", name in (required or ()))
            for name, inner in lark.properties_of(schema).items()
        ]
        rules += lark.comma_list(f"arguments_{i}", members, '", "')
        bodies.append(f"{lark.text(function['name'] + '(')} arguments_{i}")
    more = '(", " call)*' if parallel else ""
    return "\n".join(
        [
            f'calls: "[" call {more} "]" {delimiter(CLOSE)}',
            'call: body ")"',
            lark.one_of("body", bodies),
            *rules,
            r"QUOTED: /'[^'\\\n]*'/",
        ]
    )


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A value of this schema: as JSON, or where it is a text or a word, as Python."""
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    fields = dict(schema) if isinstance(schema, Mapping) else {}
    types, known = lark.types_of(schema, root), lark.resolve_reference(schema, root)
    choices = [lark.value({**named, **fields})]
    texts = [one for one in lark.constants(known) if isinstance(one, str)]
    choices += [lark.text(f"'{one}'") for one in texts if not re.search(r"['\\]", one)]
    if (not types or "string" in types) and not known.keys() - _FREE:
        choices.append("QUOTED")
    choices += ['"True"', '"False"'] if types == {"boolean"} else []
    return f"({' | '.join(choices)})"


def _as_python(call: Mapping[str, Any]) -> str:
    name, arguments = call["name"], call["arguments"]
    if not isinstance(arguments, Mapping):
        return f"{name}({arguments})"
    values = (f"{key}={_literal(value)}" for key, value in arguments.items())
    return f"{name}({', '.join(values)})"


def _literal(value: object) -> str:
    is_word = value is None or isinstance(value, bool)
    return str(value) if is_word else json.dumps(value, ensure_ascii=False)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with calls as the model wrote them: the template writes contents only."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = ", ".join(_as_python(call["function"]) for call in calls)
    opening, closing = map(TemplateText.own, (OPEN, CLOSE))  # the template's words
    return {**message, "content": message["content"] + opening + f"[{written}]" + closing}


_LFM2_5 = ToolFormat(
    name="pythonic",
    template_patterns=(r"List of tools: ", r"<\|tool_call_start\|>\["),
    delimiters=(OPEN, CLOSE),
    make_parser=PythonicParser,
    rules=_pythonic_rules,
    opening=OPEN,
    unwritable=r"\W|^\d",
)
FORMATS = (
    _LFM2_5,
    # LFM2, and the first ones of LFM2.5.
    replace(_LFM2_5, name="lfm2", template_patterns=("List of tools: ",), message=_message),
)
