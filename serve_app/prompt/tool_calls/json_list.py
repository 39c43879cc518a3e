"""The common parts of formats whose calls are a JSON list, after an opening and perhaps before a closing.

Each call is an object with `name` and `arguments`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS, Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

Rules = Callable[[Sequence[Function], lark.Delimiter, bool], str]


def parser_of(opening: str, closing: str = "") -> type[CallParser]:
    """A parser of such calls."""

    class JsonListParser(CallParser):
        def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
            calls = yield from self._json_calls(text, ("arguments",))
            if closing:
                yield from text.run(BLANKS)
                yield from text.one_of(closing)
            return calls

    JsonListParser.opening = opening
    return JsonListParser


def rules_of(closing: str = "") -> Rules:
    """The grammar rules of such calls."""

    def rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
        bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
        more = '(", " body)*' if parallel else ""
        end = delimiter(closing) if closing else ""
        return f'calls: "[" body {more} "]" {end}\n{lark.one_of("body", bodies)}'

    return rules


def written(*calls: ToolCall) -> str:
    """The list."""
    bodies = (
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in calls
    )
    return f"[{', '.join(bodies)}]"


def made(name: str, pattern: str, opening: str, closing: str = "") -> ToolFormat:
    """A format of such calls, for templates that have the pattern."""
    parser = parser_of(opening, closing)
    first, second = EXAMPLE_CALLS
    return ToolFormat(
        name=name,
        template_patterns=(pattern,),
        delimiters=(opening, closing) if closing else (opening,),
        make_parser=lambda _: parser(),
        rules=rules_of(closing),
        example=Example(
            f"{opening}{written(first)}{closing}",
            f"{opening}{written(second)}{closing}",
            both=f"{opening}{written(first, second)}{closing}",
        ),
        opening=opening,
    )
