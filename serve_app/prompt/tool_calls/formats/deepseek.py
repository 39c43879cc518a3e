"""DeepSeek's format of tool calls, of V3 and R1, and of V3.1.

All calls of an answer are in one section. V3 and R1 write `function`, the name, and a JSON object in a
block of code; V3.1 the name and the object.

Source: the chat templates of DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS, Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader

DELIMITERS = OPEN, CALL, SEPARATOR, CALL_END, CLOSE = (
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001  # these bars are theirs
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
)
_KIND, _CODE = "function", "```"
_NAME, _WORD = re.compile(r"[\w.-]*"), re.compile(r"\w*")


class DeepSeekParser(CallParser):
    """Takes both."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        yield from text.run(BLANKS)
        while (yield from text.one_of(CALL, CLOSE)) == CALL:
            called = yield from self._one(text)
            if not called:
                raise NoCallError
            calls += called
            yield from text.run(BLANKS)
            yield from text.one_of(CALL_END)
            yield from text.run(BLANKS)
        return calls

    def _one(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        name = yield from text.run(_NAME)
        yield from text.one_of(SEPARATOR)
        if name == _KIND and (yield from text.peek()) not in "{ \n":
            name = yield from text.run(_NAME)
        yield from text.run(BLANKS)
        has_code = (yield from text.peek()) == _CODE[0]
        if has_code:
            yield from text.one_of(_CODE)
            yield from text.run(_WORD)
        calls = yield from self._named_call(name or None, text)
        if has_code:
            yield from text.run(BLANKS)
            yield from text.one_of(_CODE)
        return calls


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    begin, separator, end = delimiter(CALL), delimiter(SEPARATOR), delimiter(CALL_END)
    bodies = []
    for function in functions:
        opening = lark.text(f"{function['name']}\n{_CODE}json\n")
        closing = lark.text(f"\n{_CODE}")
        bodies.append(f"{opening} {lark.arguments(function)} {closing}")
    more = '("\\n" call)*' if parallel else ""
    return f"""calls: call {more} {delimiter(CLOSE)}
call: {begin} "{_KIND}" {separator} body {end}
{lark.one_of("body", bodies)}"""


def _written(*calls: ToolCall) -> str:
    bodies = (
        f"{CALL}{_KIND}{SEPARATOR}{one.name}\n{_CODE}json\n{one.arguments}\n{_CODE}{CALL_END}"
        for one in calls
    )
    return "\n".join(bodies).join((OPEN, CLOSE))


_FIRST, _SECOND = EXAMPLE_CALLS

FORMAT = ToolFormat(
    name="deepseek",
    template_patterns=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),  # noqa: RUF001
    delimiters=DELIMITERS,
    make_parser=lambda _: DeepSeekParser(),
    rules=_rules,
    example=Example(_written(_FIRST), _written(_SECOND), both=_written(_FIRST, _SECOND)),
    opening=OPEN,
)
