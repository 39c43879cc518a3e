"""Formats that write each argument between tags: its name, and its value as JSON or, for strings, as text.

Sources: the chat templates of Qwen3-Coder, GLM 4.6, GLM 4.7 Flash and MiniMax M2; Qwen's
`qwen3coder_tool_parser.py`; MiniMax's "tool calling guide".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader


class TaggedParser(CallParser):
    """Reads values by the schemas of the functions, as OpenAI describes these."""

    def _value(self, call: TaggedCall, key: str, text: str) -> None:
        schema = self._schemas.get(call.name, {})
        value = lark.read_value(text, lark.properties_of(schema).get(key), schema)
        self._argument(call, key, value)


def _bodies(
    functions: Sequence[Function],
    name: Callable[[str], str],
    parameter: Callable[[str], str],
    closing: str,
) -> str:
    """The rule `body`: a function's name and its parameters, in the order of their schema, as grammars say
    them."""
    bodies = [
        " ".join([name(function["name"]), *lark.parameters(function, parameter, closing)])
        for function in functions
    ]
    return f"{lark.one_of('body', bodies)}\n{lark.free_text(closing)}"


# -- Qwen3-Coder, also Qwen3.5, Nemotron 3 and Step 3.5 ------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


class QwenCoderParser(TaggedParser):
    """Tags for the function and for each parameter between `<tool_call>` and `</tool_call>`."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        yield from text.one_of(FUNCTION)
        call = TaggedCall((yield from text.run(_NAME)))
        yield from text.one_of(">")
        yield from text.run(BLANKS)
        tag = yield from text.one_of(PARAMETER, FUNCTION_END)
        if tag == FUNCTION_END:
            yield from text.run(BLANKS)
            yield from text.one_of(CLOSE)
        while tag == PARAMETER and call.name:
            key = yield from text.run(_NAME)
            yield from text.one_of(">")
            value, tag = yield from self._until_tag(text)
            self._value(call, key, value)
        return self._tagged_call(call)

    def _until_tag(self, text: TextReader) -> Reading[tuple[str, str]]:
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


def _qwen_coder_rules(
    functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool
) -> str:
    bodies = _bodies(
        functions,
        lambda name: lark.text(f"{FUNCTION}{name}>\n"),
        lambda name: lark.text(f"{PARAMETER}{name}>\n"),
        lark.text(f"\n{PARAMETER_END}\n"),
    )
    more = f'("\\n" {delimiter(OPEN)} call)*' if parallel else ""
    return f"""calls: call {more}
call: "\\n" body "</function>\\n" {delimiter(CLOSE)}
{bodies}"""


# -- GLM 4.5, 4.6 and 4.7 ------------------------------------------------------------------------------

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GLM_NAME = re.compile(r"[^<>\s]*")


class GlmParser(TaggedParser):
    """A name, and then for each parameter its name and its value in tags, with line ends between them
    until GLM 4.6."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        call = TaggedCall((yield from text.run(_GLM_NAME)))
        yield from text.run(BLANKS)
        while (yield from text.one_of(KEY, CLOSE)) == KEY:
            key = (yield from text.until(KEY_END)).strip()
            yield from text.run(BLANKS)
            yield from text.one_of(VALUE)
            self._value(call, key, (yield from text.until(VALUE_END)))
            yield from text.run(BLANKS)
        return self._tagged_call(call)


def _glm_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    def opening(name: str) -> str:
        key = f"{delimiter(KEY)} {lark.text(name)} {delimiter(KEY_END)}"
        return f'"\\n"? {key} "\\n"? {delimiter(VALUE)}'

    more = f'("\\n"? {delimiter(OPEN)} call)*' if parallel else ""
    return f"""calls: call {more}
call: body "\\n"? {delimiter(CLOSE)}
{_bodies(functions, lark.text, opening, delimiter(VALUE_END))}"""


# -- MiniMax M2 ----------------------------------------------------------------------------------------

MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
NAMED, NAME_END = '<parameter name="', '">'
_INVOKED = re.compile(r'[^<>"\s]*')
_PARAMETER_NAME = re.compile(r'[^<>"\n]*')


class MiniMaxParser(TaggedParser):
    """All calls of an answer stand in one section."""

    opening = MINIMAX_OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        yield from text.run(BLANKS)
        while (yield from text.one_of(INVOKE, MINIMAX_CLOSE)) == INVOKE:
            called = yield from self._call(text)
            if not called:
                raise NoCallError
            calls += called
            yield from text.run(BLANKS)
        return calls

    def _call(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        call = TaggedCall((yield from text.run(_INVOKED)))
        yield from text.one_of(NAME_END)
        yield from text.run(BLANKS)
        while (yield from text.one_of(NAMED, INVOKE_END)) == NAMED:
            key = yield from text.run(_PARAMETER_NAME)
            yield from text.one_of(NAME_END)
            self._value(call, key, (yield from text.until(PARAMETER_END)))
            yield from text.run(BLANKS)
        return self._tagged_call(call)


def _minimax_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = _bodies(
        functions,
        lambda name: lark.text(f"{INVOKE}{name}{NAME_END}\n"),
        lambda name: lark.text(f"{NAMED}{name}{NAME_END}"),
        lark.text(f"{PARAMETER_END}\n"),
    )
    more, end = ("call*" if parallel else ""), lark.text(f"{INVOKE_END}\n")
    return f"""calls: "\\n" call {more} {delimiter(MINIMAX_CLOSE)}
call: body {end}
{bodies}"""


FORMATS = (
    ToolFormat(
        name="qwen-coder",
        template_patterns=(OPEN, FUNCTION, PARAMETER),
        delimiters=(OPEN, CLOSE),
        make_parser=QwenCoderParser,
        rules=_qwen_coder_rules,
        opening=OPEN,
        unwritable=r"[<>\n]",
    ),
    ToolFormat(
        name="glm",
        template_patterns=(OPEN, KEY, VALUE),
        delimiters=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
        make_parser=GlmParser,
        rules=_glm_rules,
        opening=OPEN,
        unwritable=r"[<>\n]",
    ),
    ToolFormat(
        name="minimax",
        template_patterns=(MINIMAX_OPEN, "<invoke name=", "<parameter name="),
        delimiters=(MINIMAX_OPEN, MINIMAX_CLOSE),
        make_parser=MiniMaxParser,
        rules=_minimax_rules,
        opening=MINIMAX_OPEN,
        unwritable=r'[<>"\n]',
    ),
)
