"""The Hermes format of tool calls.

Each call is a JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>`. Qwen2.5's,
Qwen3's, Granite 4's and Corral's own chat templates ask for it.

Source: the Hermes Function Calling repository of Nous Research.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import CallParser, Found, Function, calls_of, json_at

MARKS = OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Some models write `parameters` where they should write `arguments`."""

    mark = OPEN

    def _read(self, text: str) -> Found | None:
        end = text.find(CLOSE)
        if end < 0:
            return None
        body = text[:end]
        found = json_at(body)
        if found is None or body[found[1] :].strip():
            return (), 0
        return calls_of(found[0], arguments=("arguments", "parameters")), end + len(CLOSE)


def rules(functions: Sequence[Function], mark: lark.Mark, parallel: bool) -> str:
    """See ToolFormat."""
    bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
    more = f'("\\n" {mark(OPEN)} call)*' if parallel else ""
    return (
        f'calls: call {more}\ncall: "\\n" body "\\n" {mark(CLOSE)}\n{lark.one_of("body", bodies)}'
    )
