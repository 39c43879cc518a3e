"""Translates what a request wants its text to match into an llguidance grammar, the engine's form.

Every function raises InvalidRequestError that says what is wrong, and names `param`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve_app.base.errors import InvalidRequestError
from serve_app.kernels.llama.grammars.constraint import LIMITS
from serve_app.prompt import gbnf, json_schemas
from serve_app.prompt.json_schemas import MAX_LITERAL_CHARS, SchemaError
from serve_app.prompt.output_parser import THINK, ReasoningTags
from serve_app.prompt.tool_calls import ToolFormat, lark
from serve_app.prompt.tool_calls.calls import Function
from serve_app.prompt.tool_calls.format import ThinkingPhase

MAX_CHARS = 2**18
"""The longest grammar, and the longest schemas of a request, as JSON and without what they say to
people. Each character takes 0.7 µs and 300 bytes of llguidance."""
_BYTES = LLTokenizer("byte")
"""A vocabulary that can write everything."""

Loosened = Callable[[Iterable[str]], None]
"""The receiver of the paths of keywords that a grammar does not hold."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes an answer: its format of calls, and its reasoning."""

    tool_format: ToolFormat
    delimiter_token: Callable[[str], int | None] = lambda _: None
    """The tokens of delimiters: `serve_app.kernels.llama.model.Model.delimiter_token`."""
    thinking: ThinkingPhase = ThinkingPhase.NEVER
    tags: ReasoningTags = THINK

    def write(self, delimiter: str) -> str:
        """The delimiter in Lark: as a token, if it is one, or else as its text."""
        token = self.delimiter_token(delimiter)
        return lark.text(delimiter) if token is None else f"<[{token}]>"

    def lazy(self, delimiter: str) -> str:
        """The mark of a lexeme that ends with the first such delimiter, where that is a text."""
        return "[lazy]" if self.delimiter_token(delimiter) is None else ""

    def forced_start(self, *, has_calls: bool) -> str:
        """The rule `start`: reasoning, if there is any, and then `answer`, or with the flag `calls`."""
        write, form = self.write, self.tool_format
        if form.forced_start is not None and self.thinking is not ThinkingPhase.BEHIND:
            return form.forced_start(write, has_calls, self.thinking)
        opening = "" if form.opening is None else " ".join(lark.pieces(form.opening, write))
        return self.after_thinking(f"answer | {opening} calls" if has_calls else "answer")

    def after_thinking(self, body: str) -> str:
        """The rule `start`: reasoning, if there is any, and then the body."""
        comes = self.thinking in (ThinkingPhase.PERHAPS, ThinkingPhase.BEGUN)
        if not comes or self.tool_format.has_channels:
            return f"start: {body}"
        thought = "thought GAP?"
        if self.thinking is ThinkingPhase.PERHAPS:
            thought = f"({self.write(self.tags.open)} thought GAP?)?"
        return f"""start: {thought} held
held: {body}
thought{self.lazy(self.tags.close)}: TEXT {self.write(self.tags.close)}
TEXT: /(.|\\n)*/
GAP: /\\s+/"""


def _nobody(paths: Iterable[str]) -> None:
    """Take no notice."""


def from_json_schema(
    schema: Mapping[str, Any],
    param: str,
    dialect: Dialect | None = None,
    loosened: Loosened = _nobody,
) -> str:
    """A JSON text that the schema validates, after the reasoning of the dialect, if there is one."""
    rule = f"answer: {lark.value(_fit_schema(schema, param, loosened))}"
    start = "start: answer" if dialect is None else dialect.forced_start(has_calls=False)
    return _check_ends(_grammar(start, rule), param)


def from_tool_calls(
    functions: Sequence[Function],
    dialect: Dialect,
    *,
    forced: bool,
    parallel: bool,
    param: str,
    answer: Mapping[str, Any] | None = None,
    loosened: Loosened = _nobody,
) -> str:
    """Calls of these functions, with arguments that their schemas validate: one, and with `parallel`
    perhaps more. If they are not forced, any text may come before them, or instead of them. With the
    schema of an `answer`, only reasoning may come before them, and a JSON text instead of them that it
    validates. Of a function's schema, whatever a grammar cannot hold is loosened."""
    rules = [
        dialect.tool_format.rules(_fitting(functions, dialect, loosened), dialect.write, parallel)
    ]
    if answer is not None and not forced:
        rules.append(f"answer: {lark.value(_fit_schema(answer, 'response_format', loosened))}")
    start = _start_of_calls(dialect, forced=forced, has_answer=answer is not None)
    return _check_grammar(_grammar(start, *rules), param)


def _start_of_calls(dialect: Dialect, *, forced: bool, has_answer: bool) -> str:
    """The rule `start`, and the rules that only it needs."""
    form = dialect.tool_format
    opening = "" if form.opening is None else " ".join(lark.pieces(form.opening, dialect.write))
    if forced:
        return f"start: {opening} calls"
    if has_answer:
        return dialect.forced_start(has_calls=True)
    if form.free_start is not None:
        start = form.free_start(dialect.write)
        if not form.holds_answers:
            return start
        return dialect.after_thinking(start.removeprefix("start: "))
    if form.opening is None:
        return "start: calls | OTHER?\nOTHER: /\\s*[^{\\s](.|\\n)*/"
    # A lazy lexeme ends with the opening, so that no text can have it.
    # Control tokens are no text, so reasoning that has them for tags needs a rule.
    tags = [dialect.delimiter_token(tag) for tag in dialect.tags]
    reasoning = "" if None in tags else f"((TEXT <[{tags[0]}]>)? TEXT <[{tags[1]}]>)?"
    return f"""start: {reasoning} (TEXT | opened calls)
opened{dialect.lazy(form.opening)}: TEXT {opening}
TEXT: /(.|\\n)*/"""


def _fitting(
    functions: Sequence[Function], dialect: Dialect, loosened: Loosened
) -> list[dict[str, Any]]:
    """The functions with the schemas of their arguments as a grammar can hold them. Raises
    InvalidRequestError for a strict function whose schema is wrong."""
    fitting: list[dict[str, Any]] = []
    for function in functions:
        schema = json_schemas.of_arguments(function.get("parameters"))
        try:
            held = json_schemas.fit(schema, is_strict=bool(function.get("strict")))
        except SchemaError as error:
            message = f"tools: the function {function['name']!r}: {error}"
            raise InvalidRequestError(message, "tools") from error
        place = f"tools.{function['name']}.parameters"
        loosened(f"{place}.{path}" if path else place for path in held.loosened)
        parameters = held.schema if held.schema.get("type") == "object" else {"type": "object"}
        parameters, unwritable = dialect.tool_format.without_unwritable(parameters)
        loosened(f"{place}.properties.{name}" for name in unwritable)
        fitting.append({"name": function["name"], "parameters": parameters})
    sizes = [len(json.dumps(function)) for function in fitting]
    for i in sorted(range(len(fitting)), key=lambda i: -sizes[i]):
        if sum(sizes) <= MAX_CHARS:
            break
        fitting[i]["parameters"], sizes[i] = {"type": "object"}, 0
        loosened([f"tools.{fitting[i]['name']}.parameters"])
    return fitting


def _fit_schema(schema: object, param: str, loosened: Loosened) -> dict[str, Any]:
    try:
        held = json_schemas.fit(schema, is_strict=True)
    except SchemaError as error:
        raise InvalidRequestError(f"{param}: {error}", param) from error
    loosened(f"{param}.{path}" if path else param for path in held.loosened)
    _check_length(json.dumps(held.schema), param)
    return held.schema


def _grammar(*rules: str) -> str:
    return LLMatcher.grammar_from_lark("\n".join(("%llguidance {}", *rules, "")))


def from_gbnf(text: str, param: str) -> str:
    """A text that llama.cpp's kind of grammar derives."""
    try:
        grammar = gbnf.lark(_check_length(text, param))
    except ValueError as error:
        raise InvalidRequestError(f"{param}: not a GBNF grammar: {error}.", param) from error
    return _check_ends(LLMatcher.grammar_from_lark(grammar), param)


def from_regex(text: str, param: str) -> str:
    """A text that the regular expression matches as a whole."""
    if len(text) > MAX_LITERAL_CHARS:
        raise InvalidRequestError(f"{param}: longer than {MAX_LITERAL_CHARS} characters.", param)
    return _check_ends(LLMatcher.grammar_from_regex(text), param)


def _check_length(text: str, param: str) -> str:
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"{param}: longer than {MAX_CHARS} characters.", param)
    return text


def _check_ends(grammar: str, param: str) -> str:
    """The grammar, if some text matches it: a rule that needs itself is never at an end."""
    matcher = LLMatcher(_BYTES, _check_grammar(grammar, param), log_level=0, limits=LIMITS)
    matcher.compute_logit_bias()
    if matcher.is_error():
        raise InvalidRequestError(f"{param}: no text matches it.", param)
    return grammar


def _check_grammar(grammar: str, param: str) -> str:
    """The grammar, if llguidance takes it. Its message may quote rules that no client wrote, so that only
    the last line counts, which says why."""
    error = LLMatcher.validate_grammar(grammar)
    if error and not error.startswith("WARNING"):
        reason = json_schemas.sentence(error)
        raise InvalidRequestError(f"{param}: the grammar cannot be used: {reason}", param)
    return grammar
