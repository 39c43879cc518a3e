"""Mistral's older format of tool calls (Nemo, and all until the end of 2024).

Behind `[TOOL_CALLS]`, a JSON list of objects with `name`, `arguments` and perhaps `id`.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark, mistral
from serve_app.prompt.tool_calls.calls import Function
from serve_app.prompt.tool_calls.format import Example, ToolFormat


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    call_id = '(", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\"")?'
    bodies = [f'{lark.json_call(one, "arguments")} {call_id} "}}"' for one in functions]
    more = '(", " body)*' if parallel else ""
    return f'calls: "[" body {more} "]"\n{lark.one_of("body", bodies)}'


_FIRST = '{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}, "id": "a1B2c3D4e"}'
_SECOND = '{"name": "now", "arguments": {}}'

FORMAT = ToolFormat(
    name="mistral-list",
    template_patterns=(r"\[TOOL_CALLS\]",),
    delimiters=mistral.DELIMITERS,
    make_parser=lambda _: mistral.MistralParser(),
    rules=_rules,
    example=Example(
        first=f"[TOOL_CALLS][{_FIRST}]",
        second=f"[TOOL_CALLS][{_SECOND}]",
        both=f"[TOOL_CALLS][{_FIRST}, {_SECOND}]",
    ),
    opening=mistral.OPEN,
    message=mistral.with_short_ids,
)
