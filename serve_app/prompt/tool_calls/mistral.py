"""Mistral's formats of tool calls, both behind `[TOOL_CALLS]`.

A JSON list of objects with `name`, `arguments` and perhaps `id` (Nemo, and all until the end of 2024), or
a name, `[ARGS]` and a JSON object for each call.

Source: the tokenizers of Mistral AI's `mistral-common`, versions 3 to 13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import (
    CallParser,
    Found,
    Function,
    call_of,
    calls_of,
    json_at,
)

MARKS = OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]")
_NO_MARK = re.compile(r"\s*[\w.-]*(?:\[CALL_ID\]\w*)?")


class MistralParser(CallParser):
    """Takes both formats."""

    mark = OPEN

    def _read(self, text: str) -> Found | None:
        if text.lstrip().startswith(("[", "{")):
            return self._read_list(text)
        name = _NAME.match(text)
        if name is None:
            rest = _NO_MARK.sub("", text, count=1)
            return None if any(mark.startswith(rest) for mark in (ARGUMENTS, CALL_ID)) else ((), 0)
        begun = text[name.end() :].lstrip()
        if begun and not begun.startswith("{"):
            return (), 0
        found = json_at(text, name.end())
        if found is None:
            return None
        arguments, end = found
        call = call_of(name[1], arguments)
        return ((call,) if call else ()), end

    def _read_list(self, text: str) -> Found | None:
        found = json_at(text)
        if found is None:
            return None
        bodies, end = found
        bodies = bodies if isinstance(bodies, list) else [bodies]
        return calls_of(*bodies, arguments=("arguments",)), end


def list_rules(functions: Sequence[Function], mark: lark.Mark, parallel: bool) -> str:
    """See ToolFormat."""
    call_id = '(", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\"")?'
    bodies = [f'{lark.json_call(one, "arguments")} {call_id} "}}"' for one in functions]
    more = '(", " body)*' if parallel else ""
    return f'calls: "[" body {more} "]"\n{lark.one_of("body", bodies)}'


def named_rules(functions: Sequence[Function], mark: lark.Mark, parallel: bool) -> str:
    """See ToolFormat."""
    bodies = [
        f"{lark.text(function['name'])} {mark(ARGUMENTS)} {lark.arguments(function)}"
        for function in functions
    ]
    more = f"({mark(OPEN)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', bodies)}"


def with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
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
