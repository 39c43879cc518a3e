"""Formats whose calls are JSON objects with `name` and `arguments` between two tags.

Hermes has `<tool_call>` and `</tool_call>`, with line ends. Qwen2.5's, Qwen3's, Granite 4's and Corral's
own chat templates ask for it. Phi-4 mini has `<|tool_call|>` and `<|/tool_call|>`.

Source: the Hermes Function Calling repository of Nous Research; llama.cpp's chat template for
Phi-4-mini-instruct, and the model's card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS, Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader


def _made(
    name: str, template_patterns: tuple[str, ...], opening: str, closing: str, *, gap: str
) -> ToolFormat:
    """The format with these tags; `gap` is between them and the object, and between calls."""

    class TaggedParser(CallParser):
        """Some models write `parameters` where they should write `arguments`, or a list of objects."""

        def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
            yield from text.run(BLANKS)
            read = self._json_calls if (yield from text.peek()) == "[" else self._json_call
            calls = yield from read(text, ("arguments", "parameters"))
            yield from text.run(BLANKS)
            yield from text.one_of(closing)
            return calls

    TaggedParser.opening = opening

    def rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
        bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
        blank = lark.text(gap) if gap else ""
        more = f"({blank} {delimiter(opening)} call)*" if parallel else ""
        call = f"call: {blank} body {blank} {delimiter(closing)}"
        return f"calls: call {more}\n{call}\n{lark.one_of('body', bodies)}"

    def written(call: ToolCall) -> str:
        body = f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'
        return gap.join([opening, body, closing])

    first, second = map(written, EXAMPLE_CALLS)
    return ToolFormat(
        name=name,
        template_patterns=template_patterns,
        delimiters=(opening, closing),
        make_parser=lambda _: TaggedParser(),
        rules=rules,
        example=Example(first, second, both=gap.join([first, second])),
        opening=opening,
    )


FORMAT = _made(
    "hermes",
    ("<tool_call>", r'(?:<tool_call>(?:\\n|\s)*\{\\*"name|\{"name": <function-name>,)'),
    "<tool_call>",
    "</tool_call>",
    gap="\n",
)
FORMATS = (
    _made(
        "phi4",
        (r"<\|tool_call\|>", r"<\|/tool_call\|>"),
        "<|tool_call|>",
        "<|/tool_call|>",
        gap="",
    ),
)
