"""Qwen3-Coder's format of tool calls, also Qwen3.5's, Nemotron 3's and Step 3.5's.

Tags for the function and for each parameter between `<tool_call>` and `</tool_call>`, with values that are
JSON or, for strings, plain text.

Source: the chat template of Qwen3-Coder, and its `qwen3coder_tool_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader
from serve_app.prompt.tool_calls.schemas import properties_of, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NAME = re.compile(r"[^<>\n]*")


class QwenCoderParser(CallParser):
    """Values are read by the schemas of the functions, as OpenAI describes these."""

    opening = OPEN

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        yield from text.one_of(FUNCTION)
        call = TaggedCall((yield from text.run(_NAME)))
        yield from text.one_of(">")
        schema = self._schemas.get(call.name, {})
        properties = properties_of(schema)
        yield from text.run(BLANKS)
        tag = yield from text.one_of(PARAMETER, FUNCTION_END)
        if tag == FUNCTION_END:
            yield from text.run(BLANKS)
            yield from text.one_of(CLOSE)
        while tag == PARAMETER and call.name:
            key = yield from text.run(_NAME)
            yield from text.one_of(">")
            value, tag = yield from self._value(text)
            self._argument(call, key, read_value(value, properties.get(key), schema))
        return self._tagged_call(call)

    def _value(self, text: TextReader) -> Reading[tuple[str, str]]:
        """A parameter's value, and the tag behind it: the next one's, or the call's end."""
        value: list[str] = []
        while True:
            value.append((yield from text.until(PARAMETER_END)))
            passed = [PARAMETER_END, (yield from text.run(BLANKS))]
            try:
                tag = yield from text.one_of(PARAMETER, FUNCTION_END)
                if tag == FUNCTION_END:
                    passed += [tag, (yield from text.run(BLANKS))]
                    yield from text.one_of(CLOSE)
            except NoCallError:  # then all of this is part of the value
                value += passed
            else:
                return "".join(value).removeprefix("\n").removesuffix("\n"), tag


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    closing = lark.text("\n</parameter>\n")
    bodies = [
        " ".join(
            [
                lark.text(f"<function={function['name']}>\n"),
                *lark.parameters(function, _opening, closing),
            ]
        )
        for function in functions
    ]
    more = f'("\\n" {delimiter(OPEN)} call)*' if parallel else ""
    return f"""calls: call {more}
call: "\\n" body "</function>\\n" {delimiter(CLOSE)}
{lark.one_of("body", bodies)}
{lark.free_text(closing)}"""


def _opening(parameter: str) -> str:
    return lark.text(f"<parameter={parameter}>\n")


_FIRST = """<tool_call>
<function=get_weather>
<parameter=city>
Tromsø
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
_SECOND = "<tool_call>\n<function=now>\n</function>\n</tool_call>"

FORMAT = ToolFormat(
    name="qwen-coder",
    template_patterns=("<tool_call>", "<function=", "<parameter="),
    delimiters=(OPEN, CLOSE),
    make_parser=QwenCoderParser,
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=f"{_FIRST}\n{_SECOND}"),
    opening=OPEN,
    unwritable=r"[<>\n]",
)
