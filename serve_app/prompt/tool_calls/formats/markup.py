"""Formats of calls as data: the literals around names and arguments.

A template that renders the calls of earlier turns shows how its model writes them. `derive` lets a
template render two calls of known words, and cuts the text into the literals between these words.

Source of the idea: llama.cpp's `common/chat-diff-analyzer.cpp`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.base.errors import InvalidRequestError
from serve_app.prompt.template_caps import Render, TemplateCaps, calls_of
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader

ID, WORD, KEY = "\ue000", "\ue001", "\ue002"
"""Places in literals: a call's id, a word that is not always the same, and the parameter's name."""
_ANY_PLACE = f"[{ID}{WORD}{KEY}]"
_TAG = lark.TAG
# A literal is matched mark by mark: tags, brackets, and what else stands between blanks.
_MARKS = re.compile(rf"{_TAG}|{_ANY_PLACE}|[][{{}}(),]|(?:(?!{_TAG}|{_ANY_PLACE})[^][\s{{}}(),])+")
_TOKENS = re.compile(rf"{_TAG}|{_ANY_PLACE}|\s|\w+|.", re.DOTALL)
_NAME, _WORDS = re.compile(r"[\w.-]*"), re.compile(r"[\w.:-]*")


@dataclass(frozen=True)
class JsonObject:
    """A call that is one JSON object: its keys, and its text in templates."""

    keys: tuple[str, str] = ("name", "arguments")
    head: str = '{"name": "'
    """The text before the name."""
    tail: str = "}"
    """The text behind the arguments."""


@dataclass(frozen=True)
class Tagged:
    """The literals around each argument, where values stand one by one: JSON, but strings as they are."""

    key: tuple[str, str]
    """The literals around the parameter's name."""
    closing: str
    """The literal that ends the value."""


@dataclass(frozen=True)
class Markup:
    """The literals of a format. In an answer, other blanks may stand in and between them."""

    call: tuple[str, str]
    """The literals before a call's name or its JSON object, and behind the call."""
    name: str = ""
    """The literal between the name and the arguments."""
    body: JsonObject | Tagged | None = None
    """How name and arguments are written; None for the name and a JSON object of the arguments."""
    section: tuple[str, str] = ("", "")
    """The literals around all calls of an answer; both are empty if each call stands for itself."""
    between: str = ""
    """The literal between two calls."""
    start: str = ""
    """The opening, where the first mark is that of other things, too."""

    @property
    def begin(self) -> str:
        """The literals before the first call's name."""
        return (self.section[0] + self.call[0]).lstrip("\n")

    @property
    def opening(self) -> str:
        """The first marks, up to one that is long enough to show a call."""
        if self.start:
            return self.start
        literal = self.begin
        end = len(literal) - len(literal.lstrip())
        for mark in _MARKS.finditer(literal):
            if mark.start() != end:
                break
            end = mark.end()
            if len(mark[0]) > 2:
                break
        return literal[:end]

    @property
    def delimiters(self) -> tuple[str, ...]:
        """The tags among the literals, which are tokens of their own in some vocabularies."""
        literals = [*self.section, *self.call, self.name, self.between]
        if isinstance(self.body, Tagged):
            literals += [*self.body.key, self.body.closing]
        return tuple(dict.fromkeys(re.findall(_TAG, " ".join(literals))))

    @property
    def name_end(self) -> str:
        """A character that no parameter's name can have: the first behind it."""
        marks = _marks(self.body.key[1]) if isinstance(self.body, Tagged) else ()
        return marks[0][0] if marks else "\n"


@functools.lru_cache(maxsize=1024)
def _marks(literal: str) -> tuple[str, ...]:
    return tuple(mark[0] for mark in _MARKS.finditer(literal))


class MarkupParser(CallParser):
    def __init__(self, functions: Sequence[Function] = (), *, markup: Markup) -> None:
        super().__init__(functions)
        self.opening = markup.opening
        self._markup = markup
        if isinstance(markup.body, JsonObject):
            self.name_key = markup.body.keys[0]

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        return self._section(text, self._markup.begin[len(self.opening) :])

    def _section(self, text: TextReader, rest: str) -> Reading[Sequence[ToolCall]]:
        """The calls behind this rest of what is before the first."""
        (begin, _), (section, end) = self._markup.call, self._markup.section
        calls: list[ToolCall] = []
        yield from _pass(text, _marks(rest))
        while True:
            called = yield from self._one(text)
            if not called:
                raise NoCallError
            calls += called
            if not section.strip():
                return calls
            again = _marks(self._markup.between + begin)
            if again:
                goes_on = yield from _either(text, again, _marks(end))
            else:
                goes_on = (yield from text.after_blanks()) == "{"
                yield from _pass(text, () if goes_on else _marks(end))
            if not goes_on:
                return calls

    def _next(self, text: TextReader, opened: str) -> Reading[Sequence[ToolCall]]:
        """The call that begins like this, the first one or another."""
        is_first = opened == self.opening
        begin = self._markup.begin if is_first else self._markup.call[0]
        yield from _pass(text, _marks(begin[len(opened) :]))
        return (yield from self._one(text))

    def _one(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        body, end = self._markup.body, _marks(self._markup.call[1])
        if isinstance(body, JsonObject):
            # Some models write a list, or `parameters` where they should write `arguments`.
            is_list = (yield from text.after_blanks()) == "["
            read = self._json_calls if is_list else self._json_call
            calls = yield from read(text, (body.keys[1], "parameters"))
            yield from _pass(text, end)
            return calls
        yield from text.run(BLANKS)
        name = yield from text.run(_NAME)
        yield from _pass(text, _marks(self._markup.name))
        if isinstance(body, Tagged):
            return (yield from self._tagged_calls(text, TaggedCall(name), body, end))
        calls = yield from self._named_call(name or None, text)
        yield from _pass(text, end)
        return calls

    def _tagged_calls(
        self, text: TextReader, call: TaggedCall, body: Tagged, end: Sequence[str]
    ) -> Reading[Sequence[ToolCall]]:
        schema = self._schemas.get(call.name, {})
        before, behind = map(_marks, body.key)
        key_pattern = re.compile(rf"[^<>\n{re.escape(self._markup.name_end)}]*")
        is_argument = yield from _either(text, before, end)
        while is_argument and call.name:
            yield from text.run(BLANKS)
            key = (yield from text.run(key_pattern)).strip()
            yield from _pass(text, behind)
            value, is_argument = yield from self._value(text, key, body, end)
            property_schema = lark.properties_of(schema).get(key)
            self._argument(call, key, lark.read_value(value, property_schema, schema))
        return self._tagged_call(call)

    def _value(
        self, text: TextReader, key: str, body: Tagged, end: Sequence[str]
    ) -> Reading[tuple[str, bool]]:
        """A parameter's value, and whether another parameter follows."""
        first, *closing = _marks(body.closing.replace(KEY, key))
        value: list[str] = []
        while True:
            value.append((yield from text.until(first)))
            passed = [first]
            try:
                yield from _pass(text, closing, passed)
                is_argument = yield from _either(text, _marks(body.key[0]), end, passed)
            except NoCallError:  # then all of this is part of the value
                value += passed
                continue
            written = "".join(value)
            if "\n" in (body.key[1][-1:], body.closing[:1]):
                written = written.removeprefix("\n").removesuffix("\n")
            return written, is_argument


def _pass(text: TextReader, marks: Sequence[str], passed: list[str] | None = None) -> Reading[None]:
    """Reads these marks, with any blanks before each."""
    passed = [] if passed is None else passed
    for mark in marks:
        passed.append((yield from text.run(BLANKS)))
        is_place = re.fullmatch(_ANY_PLACE, mark)
        passed.append((yield from (text.run(_WORDS) if is_place else text.one_of(mark))))


def _n_shared(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _either(
    text: TextReader, first: Sequence[str], second: Sequence[str], passed: list[str] | None = None
) -> Reading[bool]:
    """Reads whichever of two literals is next, and says whether it is the first."""
    passed = [] if passed is None else passed
    n_shared = _n_shared(first, second)
    yield from _pass(text, first[:n_shared], passed)
    passed.append((yield from text.run(BLANKS)))
    short, long = sorted((first[n_shared], second[n_shared]), key=len)
    if long.startswith(short):
        mark = yield from text.one_of(short)
        if (yield from text.peek()) == long[len(short)]:
            mark += yield from text.one_of(long[len(short) :])
    else:
        mark = yield from text.one_of(short, long)
    passed.append(mark)
    is_first = mark == first[n_shared]
    yield from _pass(text, (first if is_first else second)[n_shared + 1 :], passed)
    return is_first


# -- grammars -----------------------------------------------------------------------------------------


def _rules(
    functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool, *, markup: Markup
) -> str:
    (begin, end), (_, section_end) = markup.call, markup.section

    def lark_of(literal: str) -> str:
        return " ".join(_lark_pieces(literal, delimiter))

    first = lark_of(markup.begin[len(markup.opening) :])
    more = f"({lark_of(markup.between + begin)} call)*" if parallel else ""
    if isinstance(markup.body, Tagged):
        closing = _lark_pieces(markup.body.closing.partition(KEY)[0], delimiter)
        bodies, free = tagged_bodies(functions, lark_of, markup.name, markup.body, closing)
    else:
        body = markup.body or JsonObject(head="", tail="")
        bodies = [
            f"{lark_of(body.head + one['name'] + markup.name)} {lark.arguments(one)} {lark_of(body.tail)}"
            for one in functions
        ]
        free = ""
    return f"""calls: {first} call {more} {lark_of(section_end)}
call: body {lark_of(end)}
PLACE: /[\\w-]{{1,32}}/
{lark.one_of("body", bodies)}
{free}"""


def tagged_bodies(
    functions: Sequence[Function],
    lark_of: Callable[[str], str],
    name: str,
    body: Tagged,
    closing: list[str],
) -> tuple[list[str], str]:
    """A body for each function, and the rule of free text. `closing` are the pieces of the literal behind a
    value, up to the parameter's name if it is part of that."""
    _, place, rest = body.closing.partition(KEY)
    end, *behind = closing
    if behind and end.startswith('"'):  # a string ends at the first token, with any text before
        end, behind = f"({end})? {behind[0]}", behind[1:]

    def opening(key: str) -> str:
        return lark_of(body.key[0] + key + body.key[1])

    def ending(key: str) -> str:
        return " ".join([*behind, lark_of((key if place else "") + rest)])

    bodies = [
        " ".join([lark_of(one["name"] + name), *lark.parameters(one, opening, end, ending)])
        for one in functions
    ]
    return bodies, lark.free_text(end)


def _lark_pieces(literal: str, delimiter: lark.Delimiter) -> list[str]:
    """The pieces of the literal in Lark: texts, tokens, and places."""
    parts = re.split(f"([{ID}{WORD}])", literal)
    return [
        piece
        for part in parts
        for piece in (["PLACE"] if part in (ID, WORD) else lark.pieces(part, delimiter))
    ]


# -- what a template shows ----------------------------------------------------------------------------

_CONTENT = "wzqc"
_CALLED = (("wzqf", {"wzqk": "wzqv", "wzqn": 4711}), ("wzqg", {"wzqk": "wzqw", "wzqn": 4712}))
"""Names and arguments that no template has."""
_Called = Sequence[tuple[str, dict[str, Any]]]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {
                    "wzqk": {"type": "string", "description": "A text"},
                    "wzqn": {"type": "integer", "description": "A number"},
                },
                "required": ["wzqk", "wzqn"],
            },
        },
    }
    for name, _ in _CALLED
]
_OBJECT = re.compile(r"""\{[^{}]*"(\w+)":\s*"$""")
_OBJECT_NAME = re.compile(r"""",\s*"(\w+)":\s*""")
_OBJECT_TAIL = re.compile(r"[^{}]*\}")


def derive(render: Render, known: ToolFormat, caps: TemplateCaps, *, eos: str) -> ToolFormat:
    """The format in which a template with these abilities writes calls. It is the known format if the
    calls cannot be told from other text, or not be read again. `eos` is the token that ends an
    answer."""
    called = _CALLED if caps.parallel_calls else _CALLED[:1]
    try:
        text = _written_calls(render, called, caps, eos)
        markup = _markup(text, called)
        if not markup.opening:
            return known
    except (InvalidRequestError, _UnclearError):
        return known
    form = of_markup(known.name if known.opening else "derived", (), markup, message=known.message)
    parser = form.parser(_TOOLS)
    parts = [*parser.feed(text.replace(ID, "id")), *parser.finish()]
    calls = [
        (part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part
        for part in parts
        if not (isinstance(part, str) and part.isspace())
    ]
    return form if calls == list(called) else known


class _UnclearError(Exception):
    """The text does not show how calls are written."""


def _written_calls(render: Render, called: _Called, caps: TemplateCaps, eos: str) -> str:
    """The calls as the template writes them, without what is around them."""
    user = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": _CONTENT}
    calls = calls_of(
        (name, arguments if caps.object_arguments else json.dumps(arguments))
        for name, arguments in called
    )
    plain = render([user, answer], _TOOLS)
    whole = render([user, {**answer, "tool_calls": calls}], _TOOLS)
    plain, whole = plain.removesuffix(eos), whole.removesuffix(eos)
    behind = plain[plain.rfind(_CONTENT) + len(_CONTENT) :]
    content = whole.rfind(_CONTENT, 0, whole.rfind(called[0][0]))
    text = whole[len(_shared_start(plain, whole)) if content < 0 else content + len(_CONTENT) :]
    end = _shared_end(behind, text)
    text = text[: len(text) - len(end)]
    for call in calls:
        text = text.replace(call["id"], ID)
    if behind.strip() and not end.strip():  # a tag of its own ends turns with calls
        tokens = _TOKENS.findall(text.rstrip())
        text = "".join(tokens[:-1]) if tokens and re.fullmatch(_TAG, tokens[-1]) else ""
    if not text or _shared_start(text.lstrip(), behind.lstrip()):
        raise _UnclearError
    return text


def _shared_start(first: str, second: str) -> str:
    tokens, others = _TOKENS.findall(first), _TOKENS.findall(second)
    return "".join(tokens[: _n_shared(tokens, others)])


def _shared_end(first: str, second: str) -> str:
    tokens, others = _TOKENS.findall(first), _TOKENS.findall(second)
    return "".join(tokens[len(tokens) - _n_shared(tokens[::-1], others[::-1]) :])


def _unite(first: str, second: str) -> str:
    """Two texts as one literal, with a place for each word that differs."""
    tokens, others = _TOKENS.findall(first), _TOKENS.findall(second)
    if len(tokens) != len(others):
        raise _UnclearError
    literal = ""
    for token, other in zip(tokens, others, strict=True):
        if token != other and not (token.isalnum() and other.isalnum()):
            raise _UnclearError
        literal += token if token == other else WORD
    return literal


def _markup(text: str, called: _Called) -> Markup:
    begin, *parts = re.split("|".join(name for name, _ in called), text)
    if len(parts) != len(called):
        raise _UnclearError
    read = [
        _json_body(part, arguments) or _tagged_body(part, arguments)
        for part, (_, arguments) in zip(parts, called, strict=True)
    ]
    name, tagged, behind = read[0]
    name = _unite(name, read[-1][0])
    if read[-1][1] != tagged:
        raise _UnclearError
    end = read[-1][2]
    body: JsonObject | Tagged | None = tagged
    head, object_name = _OBJECT.search(begin), _OBJECT_NAME.fullmatch(name)
    if tagged is None and head and object_name:
        (tail, behind), (_, end) = map(_object_tail, (behind, end))
        again = _OBJECT.search(behind) if len(called) > 1 else head
        if again is None:
            raise _UnclearError
        body = JsonObject((head[1], object_name[1]), _unite(head[0], again[0]), tail)
        begin = begin[: head.start()]
        behind = behind[: again.start()] if len(called) > 1 else behind
    if len(called) == 1:
        return Markup((begin, end), name, body)
    before = _shared_end(begin, behind)
    section, behind = begin[: len(begin) - len(before)], behind[: len(behind) - len(before)]
    after = _shared_start(behind, end)
    between, section_end = behind[len(after) :], end[len(after) :]
    if bool(section.strip()) != bool(section_end.strip()) or (
        between.strip() and not section.strip()
    ):
        raise _UnclearError
    if not section.strip():
        before, section, section_end = section + before, "", ""
    return Markup((before, after), name, body, (section, section_end), between)


def _object_tail(text: str) -> tuple[str, str]:
    """The rest of a JSON object, and what is behind it."""
    tail = _OBJECT_TAIL.match(text)
    if tail is None:
        raise _UnclearError
    return tail[0], text[tail.end() :]


_Read = tuple[str, Tagged | None, str]
"""The literal behind a call's name, the form of its arguments, and the text behind them."""


def _json_body(text: str, arguments: dict[str, Any]) -> _Read | None:
    for bracket in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, bracket.start())
        except ValueError:
            continue
        if value == arguments:
            return text[: bracket.start()], None, text[end:]
    return None


def _tagged_body(text: str, arguments: dict[str, Any]) -> _Read:
    """The arguments one by one, the first of them a string."""
    (key, value), (other, number) = arguments.items()
    pattern = rf"(.*?){key}(.*?){value}(.*?){other}(.*?){number}(.*)"
    match = re.fullmatch(pattern, text, re.DOTALL)
    if match is None:
        raise _UnclearError
    name, behind_key, between, behind_other, rest = match.groups()
    before_key = _shared_end(name, between)
    closing = between[: len(between) - len(before_key)]
    blanks = before_key[: len(before_key) - len(before_key.lstrip())]
    if rest.startswith(closing.replace(key, other) + blanks):
        closing, before_key = closing + blanks, before_key.lstrip()
    elif not rest.startswith(closing.replace(key, other)):
        raise _UnclearError
    end = rest[len(closing.replace(key, other)) :]
    closing = closing.replace(key, KEY)
    if not _marks(closing) or not _marks(behind_key) or not _marks(before_key):
        raise _UnclearError
    body = Tagged((before_key, _unite(behind_key, behind_other)), closing)
    return name[: len(name) - len(before_key)], body, end


def of_markup(name: str, patterns: tuple[str, ...], markup: Markup, **options: Any) -> ToolFormat:
    """The format of a markup, whose parser and delimiters `options` may replace."""
    tagged = isinstance(markup.body, Tagged)
    own: dict[str, Any] = {
        "delimiters": markup.delimiters,
        "make_parser": partial(MarkupParser, markup=markup),
        "opening": markup.opening,
        "is_shown": True,
        "unwritable": rf"[<>\n{re.escape(markup.name_end)}]" if tagged else None,
    }
    rules = partial(_rules, markup=markup)
    return ToolFormat(name=name, template_patterns=patterns, rules=rules, **(own | options))
