"""Mistral's newer format of tool calls (Mistral Small 3.2, Devstral, Ministral 3).

For each call `[TOOL_CALLS]`, a name, perhaps `[CALL_ID]` and an id, `[ARGS]` and a JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark, mistral
from serve_app.prompt.tool_calls.calls import Function
from serve_app.prompt.tool_calls.format import Example, ToolFormat


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [
        f"{lark.text(function['name'])} {delimiter(mistral.ARGUMENTS)} {lark.arguments(function)}"
        for function in functions
    ]
    more = f"({delimiter(mistral.OPEN)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', bodies)}"


_FIRST = '[TOOL_CALLS]get_weather[ARGS]{"city": "Tromsø", "days": 2}'
_SECOND = "[TOOL_CALLS]now[ARGS]{}"

FORMAT = ToolFormat(
    name="mistral-named",
    template_patterns=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    delimiters=mistral.DELIMITERS,
    make_parser=lambda _: mistral.MistralParser(),
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=_FIRST + _SECOND),
    opening=mistral.OPEN,
    message=mistral.with_short_ids,
)
