"""Formats whose answers have parts between tags: reasoning, calls, and content.

Sources: OpenAI's guide to the harmony response format, and the chat template of gpt-oss; Cohere's chat
template of c4ai-command-r7b-12-2024 for tool use; Google's guide to the prompt format of Gemma 4, and the
model's chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from serve_app.prompt.conversation import Turn
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, Reasoning, ToolCall
from serve_app.prompt.tool_calls.format import ThinkingPhase, ToolFormat
from serve_app.prompt.tool_calls.formats.markup import (
    ID,
    WORD,
    Markup,
    MarkupParser,
    Tagged,
    of_markup,
    tagged_bodies,
)
from serve_app.prompt.tool_calls.parser import CallParser, Previous, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader, decode, overlap


class ChannelParser(CallParser):
    """Tags are no content, but the tags of calls that are none."""

    again = ""
    """The text that a call behind another begins with, where that is another one."""
    thought: tuple[str, str]
    """The texts before and after reasoning."""
    dropped: tuple[str, ...] = ()
    """Other tags that stand for nothing by themselves."""
    thought_header = re.compile(r"")
    """The characters that may follow the first tag of reasoning, a class with a star."""

    def __init__(self, functions: Sequence[Function] = (), **options: Any) -> None:
        super().__init__(functions, **options)
        self._opened = ""
        self._openings = tuple(filter(None, (self.opening, self.again)))
        self._tags = (*self._openings, *self.thought, *self.dropped)
        self._pattern = re.compile("|".join(map(re.escape, self._tags)))

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self.is_thinking:
            self.is_thinking, self._opened = False, self.thought[0]
            return at, at
        match = self._pattern.search(text, at)
        self._opened = match[0] if match else ""
        start = (
            match.start() if match else len(text) - max(overlap(text, d, at) for d in self._tags)
        )
        while self._drops_lines() and start > at and text[start - 1] == "\n":
            start -= 1
        return start, match.end() if match else None

    def _drops_lines(self) -> bool:
        """Whether line ends before the opening are no content."""
        return self._opened in ("", *self._openings)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        if self._opened in self._openings:
            return (yield from self._calls(text)) if self._schemas else ()
        if self._opened == self.thought[0]:
            yield from text.run(self.thought_header)
            yield from text.run(BLANKS)
            yield from self._reasoning(text)
        return None

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        raise NotImplementedError

    def _reasoning(self, text: TextReader) -> Reading[None]:
        while (
            self.splits_reasoning
            and (piece := (yield from text.some_until(self.thought[1]))) is not None
        ):
            self._tell(Reasoning(piece))


class _Tags(NamedTuple):
    opening: str
    """The tag that begins calls."""
    thought: tuple[str, str]
    response: tuple[str, str] = ("", "")
    behind: str = ""
    """The text behind a thought."""
    begins: bool = False
    """Whether a prompt may begin the thought."""


def _thought_rules(tags: _Tags, delimiter: lark.Delimiter) -> str:
    """The rules `thought`, which is reasoning with its tags, and TEXT, which is any text. The prompt may
    have the first tag already."""
    opening, closing, behind = (
        " ".join(lark.pieces(tag, delimiter)) for tag in (*tags.thought, tags.behind)
    )
    return f"""thought: {opening} thought_end {behind}
thought_end{_lazy(closing)}: TEXT {closing}
TEXT: /(.|\\n)*/"""


def _end_of_thought(tags: _Tags, delimiter: lark.Delimiter) -> str:
    return " ".join(["thought_end", *lark.pieces(tags.behind, delimiter)])


def _optional(tags: tuple[str, ...], delimiter: lark.Delimiter) -> list[str]:
    """Each tag as one that may be missing; nothing where there is none."""
    return [f"({' '.join(lark.pieces(tag, delimiter))})?" if tag else "" for tag in tags]


def _lazy(closing: str) -> str:
    return "[lazy]" if closing.startswith('"') else ""


def _free_start(delimiter: lark.Delimiter, *, tags: _Tags) -> str:
    """Reasoning may come first, and content before calls."""
    begin, end = _optional(tags.response, delimiter)
    call = " ".join(lark.pieces(tags.opening, delimiter))
    closed = "" if _lazy(call) else end
    begun = f"| {_end_of_thought(tags, delimiter)}" if tags.begins else ""
    return f"""start: (thought* {begun}) {begin} (TEXT {closed} | opened calls)
opened{_lazy(call)}: TEXT {closed} {call}
{_thought_rules(tags, delimiter)}"""


def _forced_start(
    delimiter: lark.Delimiter, has_calls: bool, phase: ThinkingPhase, *, tags: _Tags
) -> str:
    begin, end = _optional(tags.response, delimiter)
    calls = f"| {' '.join(lark.pieces(tags.opening, delimiter))} calls" if has_calls else ""
    answer = f"({begin} answer {end} {calls})"
    if phase is ThinkingPhase.OFF:
        return f"start: {answer}"
    is_begun = phase is ThinkingPhase.BEGUN
    before = _end_of_thought(tags, delimiter) if is_begun else "thought*"
    return f"start: {before} {answer}\n{_thought_rules(tags, delimiter)}"


# -- Command R7B and Command A ----------------------------------------------------------------------------

ACTION = ACTION_OPEN, ACTION_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CommandRParser(ChannelParser):
    """An action has a JSON list of calls. Each has `tool_name`, `parameters` and mostly `tool_call_id`."""

    opening = ACTION_OPEN
    name_key = "tool_name"
    thought = _THINKING
    dropped = _RESPONSE

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls = yield from self._json_calls(text, ("parameters",))
        yield from text.delimiter(ACTION_CLOSE)
        return calls


def _command_r_rules(
    functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool
) -> str:
    start = " ID ".join(map(lark.text, ('{"tool_call_id": "', '", "tool_name": "')))
    parameters = lark.text('", "parameters": ')
    bodies = [
        f"{lark.text(function['name'])} {parameters} {lark.arguments(function)}"
        for function in functions
    ]
    more = '("," BLANKS? call)*' if parallel else ""
    return f"""calls: "[" BLANKS? call {more} BLANKS? "]" {delimiter(ACTION_CLOSE)}
call: {start} body "}}"
ID: /[0-9]{{1,4}}/
BLANKS: /[ \\n]{{1,9}}/
{lark.one_of("body", bodies)}"""


def _command_r_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with reasoning, which the template writes before calls."""
    return {"reasoning_content": "", **message} if message.get("tool_calls") else message


# -- Gemma 4 -------------------------------------------------------------------------------------------

CALL_OPEN, CALL_CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL = ("<|channel>", "<channel|>")
_NAME, _KEY = re.compile(r"[\w.-]*"), re.compile(r"[^:{}\[\],<]*")
_MOST_DEPTH = 32


class GemmaParser(ChannelParser):
    """`call:`, a name, and arguments in braces, which are like JSON with bare keys and with strings between
    two quotes of their own. Keys may be strings, too."""

    opening = CALL_OPEN
    thought = _CHANNEL
    thought_header = re.compile(r"\w*")

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.one_of("call:")
        call = TaggedCall((yield from text.run(_NAME)))
        yield from text.one_of("{")
        while (key := (yield from _next_key(text, is_first=not call.arguments))) is not None:
            self._argument(call, key, (yield from _parse_value(text)))
        yield from text.one_of(CALL_CLOSE)
        return self._tagged_call(call)


def _next_key(text: TextReader, *, is_first: bool) -> Reading[str | None]:
    if is_first and (yield from text.after_blanks()) != "}":
        return (yield from _read_key(text))
    if (yield from text.delimiter(",", "}")) == "}":
        return None
    return (yield from _read_key(text))


def _read_key(text: TextReader) -> Reading[str]:
    if (yield from text.after_blanks()) == QUOTE[0]:
        yield from text.one_of(QUOTE)
        key = yield from text.until(QUOTE)
    else:
        key = (yield from text.run(_KEY)).strip()
    yield from text.delimiter(":")
    return key


def _parse_value(text: TextReader) -> Reading[object]:
    """Reads a value, which is JSON once its keys and strings stand between quotation marks."""
    written: list[str] = []
    n_open = 0
    while True:
        first = yield from text.after_blanks()
        if first == QUOTE[0]:
            yield from text.one_of(QUOTE)
            string = yield from text.until(QUOTE)
            written.append(json.dumps(string, ensure_ascii=False))
        elif first in "{}[],:":
            n_open += (first in "{[") - (first in "}]")
            written.append((yield from text.one_of(first)))
        else:
            word = yield from text.run(_KEY)
            is_key = (yield from text.after_blanks()) == ":"
            written.append(json.dumps(word.strip()) if is_key else word)
        if n_open <= 0:
            return decode("".join(written))


def _gemma_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """Parameters are in the order in which the template tells them, by name."""
    written = _Written(delimiter)
    schemas = [function.get("parameters") or {} for function in functions]
    bodies = [
        f"{lark.text(function['name'])} {written.object_of(schema, schema, 0)}"
        for function, schema in zip(functions, schemas, strict=True)
    ]
    more = f"({delimiter(CALL_OPEN)} call)*" if parallel else ""
    return "\n".join(
        [
            f"calls: call {more}",
            f'call: "call:" body {delimiter(CALL_CLOSE)}',
            lark.one_of("body", bodies),
            *written.rules,
            f"""value: string | object | list | NUMBER | "true" | "false" | "null"
string: {written.quote} string_end
string_end{_lazy(written.quote)}: /(.|\\n)*/ {written.quote}
object: "{{" (member ("," member)*)? "}}"
member: (KEY | string) ":" value
list: "[" (value ("," value)*)? "]"
KEY: /[\\w-]+/
NUMBER: /-?[0-9]+(\\.[0-9]+)?([eE][-+]?[0-9]+)?/""",
        ]
    )


class _Written:
    def __init__(self, delimiter: lark.Delimiter) -> None:
        self.quote = delimiter(QUOTE)
        self.rules: list[str] = []

    def object_of(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """The object, by rules of its properties."""
        needed, name = schema.get("required"), f"of_{len(self.rules)}"
        needed = needed if isinstance(needed, list) else []
        self.rules.append("")  # takes the number
        members = [
            (f"{lark.text(key + ':')} {self._value(inner, root, depth + 1)}", key in needed)
            for key, inner in sorted(lark.properties_of(schema).items())
        ]
        self.rules += lark.comma_list(name, members, '","')
        return f'"{{" {name} "}}"'

    def _value(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        types, known = lark.types_of(schema, root), lark.resolve_reference(schema, root)
        texts = [one for one in lark.constants(known) if isinstance(one, str)]
        if depth > _MOST_DEPTH or not types:
            return "value"
        if texts:
            return f"{self.quote} ({' | '.join(map(lark.text, texts))}) {self.quote}"
        if types == {"object"} and lark.properties_of(known):
            return self.object_of(known, root, depth)
        if types == {"array"} and "items" in known:
            item = self._value(known["items"], root, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        kinds = [_KINDS[one] for one in ("string", "object", "array") if one in types]
        if scalars := sorted(types.difference(_KINDS)):
            named = {key: root[key] for key in ("$defs", "definitions") if key in root}
            only = {**named, **schema} if not kinds else {"type": scalars}
            kinds.append(lark.value(only))
        return f"({' | '.join(kinds)})"


_KINDS = {"string": "string", "object": "object", "array": "list"}


# -- Solar Open and Kimi K3: calls between literals ------------------------------------------------------


class MarkedCallsParser(ChannelParser, MarkupParser):
    """Calls are a markup's."""

    def __init__(self, functions: Sequence[Function] = (), *, markup: Markup, tags: _Tags) -> None:
        self.thought, self.dropped = (
            tags.thought,
            tuple(
                filter(None, (*tags.response, tags.behind, *markup.section[1:], *_ENDS_OF_TURNS))
            ),
        )
        if not markup.section[1]:
            self.again = markup.call[0].partition(ID)[0]
        super().__init__(functions, markup=markup)

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        if self.again:
            return self._next(text, self._opened)
        return self._section(text, self._markup.begin[len(self.opening) :])


_SOLAR, _KIMI_K3 = (
    _Tags(
        "<|tool_calls|>", ("<|think|>", "<|end|>"), ("<|content|>", ""), behind="<|begin|>assistant"
    ),
    _Tags(
        "<|open|>tools<|sep|>",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        begins=True,
    ),
)
_ENDS_OF_TURNS = ("<|close|>message<|sep|>", "<|end_of_msg|>")


def _message_format(
    name: str, patterns: tuple[str, ...], tags: _Tags, markup: Markup
) -> ToolFormat:
    return of_markup(
        name,
        patterns,
        markup,
        delimiters=tuple(dict.fromkeys(re.findall(r"<[^<>\s]+>", " ".join(_all_of(tags, markup))))),
        make_parser=partial(MarkedCallsParser, markup=markup, tags=tags),
        opening=tags.opening,
        free_start=partial(_free_start, tags=tags),
        forced_start=partial(_forced_start, tags=tags),
        has_channels=True,
        thought=tags.thought,
        is_shown=False,
    )


def _all_of(tags: _Tags, markup: Markup) -> tuple[str, ...]:
    return (*tags.thought, *tags.response, tags.behind, *_ENDS_OF_TURNS, *markup.delimiters)


# -- Muse Glimmer: messages to `self`, to the user and to functions ---------------------------------------

_TO_SELF, _TO_USER, _NEXT = " to=self<|message|>", " to=user<|message|>", "<|start|>assistant"
_MUSE = _Tags("", (_TO_SELF, "<|eom|>"), (_TO_USER, ""), behind=_NEXT)
_INVOKED = Tagged(('<atem:parameter name="', '">'), "</atem:parameter>\n")
_MUSE_CALLS = Markup(
    ('<atem:invoke name="', "</atem:invoke>"),
    '">\n',
    _INVOKED,
    section=("<atem:function_calls>\n", "\n</atem:function_calls>"),
    start=" to=",
)


class MuseParser(ChannelParser, MarkupParser):
    """Headers are no content, but the headers of calls that are none."""

    thought = _MUSE.thought
    dropped = (_NEXT, "<|eot|>")

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions, markup=_MUSE_CALLS)

    def _drops_lines(self) -> bool:
        return True

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        if self._opened != self.opening:
            return None
        name = yield from text.run(_NAME)
        yield from text.one_of("<|message|>")
        self._n_opening += len(name) + len("<|message|>")
        if name == "self":
            yield from self._reasoning(text)
        if name in ("self", "user"):
            return None
        return (yield from self._section(text, self._markup.begin)) if self._schemas else ()


def _muse_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    def lark_of(literal: str) -> str:
        return " ".join(lark.pieces(literal, delimiter))

    closing = lark.pieces(_INVOKED.closing, delimiter)
    bodies, free = tagged_bodies(functions, lark_of, _MUSE_CALLS.name, _INVOKED, closing)
    end = lark_of(_MUSE_CALLS.call[1] + _MUSE_CALLS.section[1])
    begin = f"<|message|>{_MUSE_CALLS.begin}"
    calls = [
        f"{lark_of(_MUSE_CALLS.start + function['name'] + begin)} {body} {end}"
        for function, body in zip(functions, bodies, strict=True)
    ]
    more = f"({lark_of('<|eom|>' + _NEXT)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', calls)}\n{free}"


def _muse_free_start(delimiter: lark.Delimiter) -> str:
    to_user = " ".join(lark.pieces(_TO_USER, delimiter))
    return f"start: thought* ({to_user} TEXT | calls)\n{_thought_rules(_MUSE, delimiter)}"


# -- Functionary 3.2 -----------------------------------------------------------------------------------

RECIPIENT = ">>>"
_EVERYBODY = "all\n"


class RecipientParser(CallParser):
    """Each part of an answer has a recipient, which is a function's name, or `all` for content. The prompt
    has the mark of the first."""

    opening = RECIPIENT

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is Previous.NOTHING and at == 0:
            return at, at
        return super()._find(text, at)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        name = yield from text.run(_NAME)
        yield from text.one_of("\n")
        if name == _EVERYBODY.strip():
            return None
        return (yield from self._named_call(name or None, text)) if self._schemas else ()


def _recipient_rules(
    functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool
) -> str:
    bodies = [
        f"{lark.text(function['name'] + _LINE_END)} {lark.arguments(function)}"
        for function in functions
    ]
    more = f"({delimiter(RECIPIENT)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', bodies)}"


def _recipient_free_start(delimiter: lark.Delimiter) -> str:
    mark = delimiter(RECIPIENT)
    return f"""start: {lark.text(_EVERYBODY)} (TEXT | opened calls) | calls
opened{_lazy(mark)}: TEXT {mark}
TEXT: /(.|\\n)*/"""


def _recipient_forced_start(_: lark.Delimiter, has_calls: bool, __: ThinkingPhase) -> str:
    return f"start: {lark.text(_EVERYBODY)} answer {'| calls' if has_calls else ''}"


_LINE_END = "\n"

# -- Harmony, of gpt-oss -------------------------------------------------------------------------------

_HARMONY = START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_ENDS = (END, CALL, RETURN)
_TO = " to="
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_MOST_HEADER_CHARS = 256


class HarmonyParser(ChannelParser):
    """Reasoning, calls and content are messages on channels: `analysis` is reasoning, `final` is for the
    user, and a message to `functions.` and a name, on `commentary`, is a call. Headers are no content, but
    the headers of calls that are none."""

    opening = CHANNEL
    thought = (CHANNEL, END)
    dropped = (START, CALL, RETURN)

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is Previous.NOTHING and at == 0:
            # The prompt has begun the message already.
            if text.startswith(_TO):
                self._opened = ""
                return at, at
            if _TO.startswith(text):
                return at, None
        return super()._find(text, at)

    def _drops_lines(self) -> bool:
        return self._opened not in _ENDS

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        if self._opened in _ENDS:
            return None
        rest = yield from text.until(MESSAGE, _MOST_HEADER_CHARS)
        header = f"{self._opened}{rest}"
        self._n_opening += len(rest) + len(MESSAGE)
        to, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if to is not None:
            return (yield from self._named_call(to[1], text)) if self._schemas else ()
        if channel is not None and channel[1] == "analysis":
            yield from self._reasoning(text)
        return None


def _harmony_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """The rules for one call, which ends the answer. Its recipient is before the channel or behind it."""
    start, channel, message = delimiter(START), delimiter(CHANNEL), delimiter(MESSAGE)
    bodies = []
    for function in functions:
        name = function["name"]
        before = f'{lark.text(f"assistant to=functions.{name}")} {channel} "commentary json"'
        behind = f'{lark.text(f"commentary to=functions.{name} ")} {delimiter(CONSTRAIN)} "json"'
        header = f'({start} {before} | ({start} "assistant")? {channel} {behind})'
        bodies.append(f"{header} {message} {lark.arguments(function)}")
    return lark.one_of("calls", bodies)


def _harmony_free_start(delimiter: lark.Delimiter) -> str:
    """Reasoning and what a model says before a call may come first."""
    return f"""start: before* (calls | {_final(delimiter)} TEXT | PLAIN?)
PLAIN: /[^<](.|\\n)*/
{_before(delimiter)}"""


def _harmony_forced_start(delimiter: lark.Delimiter, has_calls: bool, phase: ThinkingPhase) -> str:
    calls = "calls |" if has_calls else ""
    answer = f"({calls} {_final(delimiter)} answer)"
    if phase is ThinkingPhase.OFF:
        return f"start: {answer}"
    return f"start: before* {answer}\n{_before(delimiter)}"


def _final(delimiter: lark.Delimiter) -> str:
    return f'{delimiter(CHANNEL)} "final" {delimiter(MESSAGE)}'


def _before(delimiter: lark.Delimiter) -> str:
    """The rules `before`, which is a message that comes before others, and TEXT, which is any text."""
    start, channel, message = delimiter(START), delimiter(CHANNEL), delimiter(MESSAGE)
    return f"""before: {channel} ("analysis" | "commentary") {message} ended {start} "assistant"
ended{_lazy(delimiter(END))}: TEXT {delimiter(END)}
TEXT: /(.|\\n)*/"""


def _harmony_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with reasoning where the template looks for it: before calls."""
    changed = dict(message)
    reasoning = changed.pop("reasoning_content", None)
    if reasoning and changed.get("tool_calls") and not changed.get("content"):
        changed["thinking"] = reasoning
    return changed


def _without_tags(turn: Turn) -> Turn:
    """The turn with the reasoning and the content of an answer that has its tags, as clients may ask for
    it. The template refuses such answers."""
    if not any(CHANNEL in text for text in (turn.text, turn.reasoning)):
        return turn
    thought, content = _split(turn.text)
    return replace(turn, parts=(content,), reasoning="".join(_split(turn.reasoning)) or thought)


def _split(answer: str) -> tuple[str, str]:
    """The reasoning in an answer, and the rest. Whatever is left of a header is a text."""
    parser = HarmonyParser()
    parts = [*parser.feed(answer), *parser.finish()]
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    rest = "".join(part for part in parts if isinstance(part, str))
    plain = f"{CHANNEL[:1]} {CHANNEL[1:]}"
    return thought.replace(CHANNEL, plain), rest.replace(CHANNEL, plain)


_COMMAND_R, _GEMMA = _Tags(ACTION_OPEN, _THINKING, _RESPONSE), _Tags(CALL_OPEN, _CHANNEL)
FORMATS = (
    _message_format(
        "solar",
        (r"<\|tool_call:begin\|>", r"<\|tool_call:args\|>", r"<\|calls\|>"),
        _SOLAR,
        Markup(
            (f"<|tool_call:begin|>{ID}<|tool_call:name|>", "<|tool_call:end|>"),
            "<|tool_call:args|>",
            section=("<|tool_calls|>", ""),  # a token that ends answers is behind
        ),
    ),
    _message_format(
        "kimi-k3",
        (r"<\|open\|>", r"<\|close\|>", r"<\|end_of_msg\|>", r"'call'|call tool="),
        _KIMI_K3,
        Markup(
            ('<|open|>call tool="', "<|close|>call<|sep|>"),
            f'" index="{WORD}"<|sep|>',
            Tagged(
                ('<|open|>argument key="', f'" type="{WORD}"<|sep|>'), "<|close|>argument<|sep|>"
            ),
            section=(_KIMI_K3.opening, "<|close|>tools<|sep|>"),
            start=_KIMI_K3.opening,
        ),
    ),
    ToolFormat(
        name="harmony",
        template_patterns=(r"<\|channel\|>analysis", r"<\|message\|>", r"to=functions|functions\."),
        delimiters=_HARMONY,
        make_parser=HarmonyParser,
        rules=_harmony_rules,
        free_start=_harmony_free_start,
        forced_start=_harmony_forced_start,
        has_channels=True,
        message=_harmony_message,
        split=_without_tags,
    ),
    ToolFormat(
        name="muse",
        template_patterns=("<atem:invoke name=", r" ?to=self"),
        delimiters=("<|eom|>", "<|eot|>", "<|start|>", "<|message|>"),
        make_parser=MuseParser,
        rules=_muse_rules,
        free_start=_muse_free_start,
        forced_start=partial(_forced_start, tags=_MUSE),
        unwritable=r'["<>\n]',
        has_channels=True,
    ),
    ToolFormat(
        name="recipients",
        template_patterns=(r">>>\$\{recipient\}", ">>>all"),
        delimiters=(RECIPIENT,),
        make_parser=RecipientParser,
        rules=_recipient_rules,
        free_start=_recipient_free_start,
        forced_start=_recipient_forced_start,
        has_channels=True,
        thinks=False,
    ),
    ToolFormat(
        name="command-r",
        template_patterns=(re.escape(ACTION_OPEN), re.escape(_RESPONSE[0])),
        delimiters=(*ACTION, *_THINKING, *_RESPONSE),
        make_parser=CommandRParser,
        rules=_command_r_rules,
        opening=ACTION_OPEN,
        free_start=partial(_free_start, tags=_COMMAND_R),
        forced_start=partial(_forced_start, tags=_COMMAND_R),
        has_channels=True,
        message=_command_r_message,
    ),
    ToolFormat(
        name="gemma",
        template_patterns=(r"<\|tool_call>call:",),
        delimiters=(CALL_OPEN, CALL_CLOSE, QUOTE, *_CHANNEL),
        make_parser=GemmaParser,
        rules=_gemma_rules,
        opening=CALL_OPEN,
        free_start=partial(_free_start, tags=_GEMMA),
        forced_start=partial(_forced_start, tags=_GEMMA),
        unwritable=r"[:{}\[\],<]",
        has_channels=True,
    ),
)
