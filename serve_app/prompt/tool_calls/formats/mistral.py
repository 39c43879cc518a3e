"""Mistral's two formats of tool calls, both behind `[TOOL_CALLS]`.

The older one (Nemo, and all until the end of 2024) has a JSON list of objects with `name`, `arguments` and
perhaps `id`. The newer one (Mistral Small 3.2, Devstral, Ministral 3) has, for each call, a name, perhaps
`[CALL_ID]` and an id, `[ARGS]` and a JSON object.

Source: the tokenizers of Mistral AI's `mistral-common`, versions 3 to 13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

DELIMITERS = OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME, _WORD = re.compile(r"[\w.-]*"), re.compile(r"\w*")


class MistralParser(CallParser):
    """Takes both formats."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        first = yield from text.peek()
        if first in "[{":
            read = self._json_calls if first == "[" else self._json_call
            return (yield from read(text, ("arguments",)))
        name = yield from text.run(_NAME)
        if (yield from text.one_of(ARGUMENTS, CALL_ID)) == CALL_ID:
            yield from text.run(_WORD)
            yield from text.one_of(ARGUMENTS)
        return (yield from self._named_call(name or None, text))


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with ids that Mistral's templates take: nine letters and digits."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]


def _list_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    call_id = '(", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\"")?'
    bodies = [f'{lark.json_call(one, "arguments")} {call_id} "}}"' for one in functions]
    more = '(", " body)*' if parallel else ""
    return f'calls: "[" body {more} "]"\n{lark.one_of("body", bodies)}'


_LISTED_FIRST = (
    '{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}, "id": "a1B2c3D4e"}'
)
_LISTED_SECOND = '{"name": "now", "arguments": {}}'


def _named_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [
        f"{lark.text(function['name'])} {delimiter(ARGUMENTS)} {lark.arguments(function)}"
        for function in functions
    ]
    more = f"({delimiter(OPEN)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', bodies)}"


_NAMED_FIRST = '[TOOL_CALLS]get_weather[ARGS]{"city": "Tromsø", "days": 2}'
_NAMED_SECOND = "[TOOL_CALLS]now[ARGS]{}"

FORMATS = (
    ToolFormat(
        name="mistral-list",
        template_patterns=(r"\[TOOL_CALLS\]",),
        delimiters=DELIMITERS,
        make_parser=lambda _: MistralParser(),
        rules=_list_rules,
        example=Example(
            first=f"[TOOL_CALLS][{_LISTED_FIRST}]",
            second=f"[TOOL_CALLS][{_LISTED_SECOND}]",
            both=f"[TOOL_CALLS][{_LISTED_FIRST}, {_LISTED_SECOND}]",
        ),
        opening=OPEN,
        message=_with_short_ids,
    ),
    ToolFormat(
        name="mistral-named",
        template_patterns=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        delimiters=DELIMITERS,
        make_parser=lambda _: MistralParser(),
        rules=_named_rules,
        example=Example(_NAMED_FIRST, _NAMED_SECOND, both=_NAMED_FIRST + _NAMED_SECOND),
        opening=OPEN,
        message=_with_short_ids,
    ),
)
