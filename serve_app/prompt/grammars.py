"""Translates what a request wants its text to match into an llguidance grammar, the engine's form.

Every function raises InvalidRequestError that says what is wrong, and names `param`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from serve_app.errors import InvalidRequestError
from serve_app.llama.grammars.constraint import LIMITS
from serve_app.prompt.output_parser import REASONING_CLOSE, REASONING_OPEN
from serve_app.prompt.tool_calls import ToolFormat, lark
from serve_app.prompt.tool_calls.calls import Function

MAX_CHARS = 65_536
"""Longest schema (as JSON) or GBNF grammar."""
MAX_LITERAL_CHARS = 16_384
"""Longest text that is to be written as it stands, and longest regular expression. The engine takes 1.3 µs
and 300 bytes for each character of one."""
MAX_DEPTH = 64
"""Deepest nesting of a schema."""
_SAID = frozenset(("$comment", "default", "description", "examples", "title"))
"""The fields of a schema for people: they may be as long as the schema."""
_LONG_LITERAL = re.compile(rf'"(?:[^"\\\n]|\\.){{{MAX_LITERAL_CHARS + 1},}}"')
_BYTES = LLTokenizer("byte")
"""A vocabulary that can write everything."""


def from_json_schema(schema: Mapping[str, Any], param: str) -> str:
    """A JSON text that the schema validates."""
    if depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"{param}: nested deeper than {MAX_DEPTH} levels.", param)
    text = _bounded(json.dumps(schema), param)
    if _has_long_literal(schema):
        raise _too_long_literal(param)
    overrides: Any = {"whitespace_pattern": lark.BLANKS, "lenient": False}
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    except ValueError as error:  # as for numbers beyond a double's range
        raise InvalidRequestError(f"{param}: {error}", param) from error
    return _matched(grammar, param)


def from_tool_calls(
    functions: Sequence[Function],
    tool_format: ToolFormat,
    delimiter_token: Callable[[str], int | None],
    *,
    forced: bool,
    parallel: bool,
    param: str,
    answer: Mapping[str, Any] | None = None,
    thinks: bool = False,
    is_thinking: bool = False,
) -> str:
    """Calls of these functions, with arguments that their schemas validate: one, and with `parallel`
    perhaps more. If they are not forced, any text may come before them, or instead of them;
    with the schema of an `answer`, nothing before them, and a JSON text instead of them that it validates.
    `thinks` and `is_thinking` say whether reasoning may come first, and whether the prompt begins it, to
    formats that hold every answer. `delimiter_token` says which delimiters are tokens of their own: see
    `serve_app.llama.model.Model.delimiter_token`."""
    schemas = [function.get("parameters") or {} for function in functions]
    schemas += [] if answer is None else [dict(answer)]
    if max(map(depth, schemas), default=0) > MAX_DEPTH:
        raise InvalidRequestError(f"{param}: nested deeper than {MAX_DEPTH} levels.", param)
    _bounded(json.dumps(schemas), param)
    if _has_long_literal(schemas):
        raise _too_long_literal(param)

    def written(text: str) -> str:
        token = delimiter_token(text)
        return lark.text(text) if token is None else f"<[{token}]>"

    opening = tool_format.opening
    if answer is None and tool_format.said is not None and not forced:
        start = tool_format.said(written)
        if thinks and tool_format.holds_answers:
            thought = (
                "thought GAP?" if is_thinking else f"({written(REASONING_OPEN)} thought GAP?)?"
            )
            lazy = "[lazy]" if delimiter_token(REASONING_CLOSE) is None else ""
            start = f"""start: {thought} answer
answer{start.removeprefix("start")}
thought{lazy}: TEXT {written(REASONING_CLOSE)}
TEXT: /(.|\\n)*/
GAP: /\\s+/"""
    elif opening is None:
        other = "OTHER?\nOTHER: /\\s*[^{\\s](.|\\n)*/" if answer is None else "answer"
        start = "start: calls" if forced else f"start: calls | {other}"
    elif forced:
        start = f"start: {written(opening)} calls"
    elif answer is not None:
        start = f"start: answer | {written(opening)} calls"
    else:
        # A lazy lexeme ends with the opening, so that no text can have it.
        # Control tokens are no text, so reasoning that has them for tags needs a rule.
        begun, ended = delimiter_token(REASONING_OPEN), delimiter_token(REASONING_CLOSE)
        has_tags = begun is not None and ended is not None
        reasoning = f"((TEXT <[{begun}]>)? TEXT <[{ended}]>)?" if has_tags else ""
        lazy = "[lazy]" if delimiter_token(opening) is None else ""
        start = f"""start: {reasoning} (TEXT | opened calls)
opened{lazy}: TEXT {written(opening)}
TEXT: /(.|\\n)*/"""
    if answer is not None and not forced:
        start += f"\nanswer: {lark.value(answer)}"
    rules = tool_format.rules(functions, written, parallel)
    return _checked(LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{start}\n{rules}\n"), param)


def from_gbnf(text: str, param: str) -> str:
    """A text that llama.cpp's kind of grammar derives."""
    if _LONG_LITERAL.search(text):
        raise _too_long_literal(param)
    try:
        lark = gbnf_to_lark(_bounded(text, param))
    except Exception as error:  # it raises nothing narrower
        raise InvalidRequestError(f"{param}: not a GBNF grammar: {error}", param) from error
    return _matched(LLMatcher.grammar_from_lark(lark), param)


def from_regex(text: str, param: str) -> str:
    """A text that the regular expression matches as a whole."""
    if len(text) > MAX_LITERAL_CHARS:
        raise InvalidRequestError(f"{param}: longer than {MAX_LITERAL_CHARS} characters.", param)
    return _matched(LLMatcher.grammar_from_regex(text), param)


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"{param}: longer than {MAX_CHARS} characters.", param)
    return text


def _has_long_literal(schema: object) -> bool:
    """Whether a schema has such a text, without recursion: callers send what they like."""
    left = [schema]
    while left:
        match left.pop():
            case str(text) if len(text) > MAX_LITERAL_CHARS:
                return True
            case dict(fields):
                left += fields
                left += (
                    value
                    for name, value in fields.items()
                    if name not in _SAID or not isinstance(value, str)
                )
            case list(items):
                left += items
    return False


def _too_long_literal(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: a text in it has more than {MAX_LITERAL_CHARS} characters.", param
    )


def depth(value: object) -> int:
    """Levels of lists and objects, without recursion: callers send what they like."""
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, Mapping | list)
        for inner in (outer.values() if isinstance(outer, Mapping) else outer)
    ]:
        depth += 1
    return depth


def _matched(grammar: str, param: str) -> str:
    """Checked, and some text may begin with it: a rule that needs itself is never at an end."""
    matcher = LLMatcher(_BYTES, _checked(grammar, param), log_level=0, limits=LIMITS)
    matcher.compute_logit_bias()
    if matcher.is_error():
        raise InvalidRequestError(f"{param}: no text matches it.", param)
    return grammar


def _checked(grammar: str, param: str) -> str:
    error = LLMatcher.validate_grammar(grammar)
    if error:
        raise InvalidRequestError(f"{param}: {error.strip()}", param)
    return grammar
