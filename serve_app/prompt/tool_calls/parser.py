"""The base of the formats' parsers: finds calls in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from serve_app.prompt.tool_calls.calls import CallPiece, Function, Reasoning, ToolCall, call_of
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader, overlap

Part = str | Reasoning | ToolCall | CallPiece
"""Content, or reasoning, or a call, or a piece of one."""

# Keys before the arguments of a call that is told in pieces.
_MOST_KEYS = 16


class Previous(Enum):
    """The kind of text that came last."""

    NOTHING = 0
    CALL = 1
    CONTENT = 2


@dataclass
class TaggedCall:
    """A call whose arguments come one by one."""

    name: str
    arguments: dict[str, object] = field(default_factory=dict)


class CallParser:
    """Splits a text that arrives in pieces into content and calls. The result does not depend on
    how the text is cut. Nothing is lost except line ends around calls, and a format's own texts between
    them. Text that looks like a call and is none comes back as content. Not thread-safe.

    With `in_pieces`, calls are CallPieces, and a call's arguments are told as they come. Parts of a
    call that were returned are not taken back: if it is cut short or goes wrong, its arguments stay
    as they are."""

    opening: str
    """The text that every call begins with."""
    name_key = "name"
    """The key of the function in calls that are JSON objects."""
    in_pieces = False
    """Whether calls are told in pieces. To be set before the first text."""
    splits_reasoning = True
    """Whether reasoning is no content, in formats with channels. To be set before the first text."""
    is_thinking = False
    """Whether the prompt has the first tag of reasoning, in formats with channels. To be set as well."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        """The schemas of the functions' arguments, by their names."""
        self._text = TextReader()
        """The text that is not certain yet: the start of an opening, or an incomplete call."""
        self._after = Previous.NOTHING
        self._reading: Reading[Sequence[ToolCall] | None] | None = None
        """Reads what is behind an opening."""
        self._n_opening = 0
        """The length of that opening, with what is dropped before it."""
        self._was_told = False
        """Whether something behind it was told."""
        self._told: list[Part] = []
        """Parts that the reading has found and `feed` has not returned."""
        self._n_told = 0
        """The calls of this opening that were told."""
        self._arguments: list[str] | None = None
        """The pieces returned so far of the arguments that are being read."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now, in order; no piece of content is empty."""
        self._text.append(text)
        parts: list[Part] = []
        while True:
            if self._reading is None:
                parts += self._content_before_opening()
            if self._reading is None:
                return parts
            try:
                next(self._reading)
                self._tell_arguments()
                return parts + self._take()
            except StopIteration as end:
                calls: Sequence[ToolCall] | None = end.value
            except NoCallError:
                calls = ()
            self._reading = None
            parts += self._take()
            parts += self._refuse() if calls is not None and not calls else self._tell_calls(calls)

    def finish(self) -> list[Part]:
        """The rest, when there is no more text; nothing of what was told in part."""
        was_told = self._reading is not None and self._was_told
        self._reading = None
        self._text.rewind()
        return [] if was_told else self._content(len(self._text.text))

    def _content_before_opening(self) -> list[Part]:
        """The text that is certainly content; begins to read if an opening follows."""
        text = self._text
        if self._after is Previous.CALL:
            while text.text.startswith("\n", text.at):
                text.advance(text.at + 1)
            text.forget()
        start, end = self._find(text.text, text.at)
        content = self._content(start) if start > text.at else []
        if end is not None:
            text.advance(end)
            self._n_opening = end - start
            self._n_told, self._was_told = 0, False
            self._reading = self._read(text)
        return content

    def _tell_calls(self, calls: Sequence[ToolCall] | None) -> list[Part]:
        self._text.forget()
        if calls is None:
            self._after = Previous.CONTENT
            return []
        self._after = Previous.CALL
        return [self._whole(call) for call in calls[self._n_told :]]

    def _whole(self, call: ToolCall) -> Part:
        return CallPiece(call.name, call.arguments) if self.in_pieces else call

    def _refuse(self) -> list[Part]:
        """The opening is content; calls may begin behind it. Parts that were returned are not."""
        if self._was_told:
            self._tell_arguments()
            self._arguments = None
            self._after = Previous.CALL
            return self._take()
        self._text.rewind()
        return self._content(self._text.at + self._n_opening)

    def _content(self, end: int) -> list[Part]:
        self._text.advance(end)
        self._after = Previous.CONTENT
        content = self._text.forget()
        return [content] if content else []

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        """The place, from this one on, where the first opening begins, with the line ends before it,
        and where it ends: None while there is only what may become one. The text's end if there is not
        even that."""
        place = text.find(self.opening, at)
        start = place if place >= 0 else len(text) - overlap(text, self.opening, at)
        while start > at and text[start - 1] == "\n":
            start -= 1
        return start, None if place < 0 else place + len(self.opening)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        """Reads what is behind an opening, and returns its calls; None if all of it was told. Raises
        NoCallError, or returns an empty list, if there is no call."""
        raise NotImplementedError

    # -- what is told before it is complete ----------------------------------------------------------

    def _tell(self, part: Part) -> None:
        """Tells what is certain, although more is to be read. The text read up to here is not content."""
        self._text.forget()
        self._was_told = True
        self._told.append(part)

    def _take(self) -> list[Part]:
        told, self._told = self._told, []
        return told

    def _tell_arguments(self) -> None:
        if self._arguments is not None and (piece := self._text.forget()):
            self._arguments.append(piece)
            self._told.append(CallPiece(None, piece))

    def _named_call(self, name: str | None, text: TextReader) -> Reading[Sequence[ToolCall]]:
        """The call of that name whose arguments, a JSON object, come next; none if there is none."""
        if not (self.in_pieces and name):
            return call_of(name, (yield from text.json()))
        if (yield from text.after_blanks()) != "{":
            raise NoCallError
        self._tell(CallPiece(name, ""))
        if (yield from text.is_empty_object()):  # with any blanks in it
            self._tell(CallPiece(None, "{}"))
            self._n_told += 1
            return [ToolCall(name, "{}")]
        self._arguments = []
        yield from text.skip_json()
        self._tell_arguments()
        arguments, self._arguments = "".join(self._arguments), None
        self._n_told += 1
        return [ToolCall(name, arguments)]

    def _argument(self, call: TaggedCall, key: str, value: object) -> None:
        """Take one more argument of a call, in a format that has them one by one."""
        first, call.arguments[key] = not call.arguments, value
        if not self.in_pieces:
            return
        written = call_of(call.name, {key: value})
        if not written:
            raise NoCallError
        start = "{" if first else ", "
        piece = f"{start}{written[0].arguments[1:-1]}"
        self._tell(CallPiece(call.name if first else None, piece))

    def _tagged_call(self, call: TaggedCall) -> Sequence[ToolCall]:
        found = call_of(call.name, call.arguments) if call.name else []
        if found and self.in_pieces:
            begun = bool(call.arguments)
            self._tell(CallPiece(None, "}") if begun else CallPiece(call.name, "{}"))
            self._n_told += 1
        return found

    def _json_call(
        self, text: TextReader, keys: tuple[str, ...], *, needs_arguments: bool = False
    ) -> Reading[Sequence[ToolCall]]:
        """The call that the JSON object that comes next stands for, with its arguments at one of
        `keys`. A call without arguments has none of these, unless it needs them."""
        body: dict[str, object] = {}
        calls: Sequence[ToolCall] = ()
        yield from text.delimiter("{")
        for _ in range(_MOST_KEYS):
            key = yield from text.json('"')
            yield from text.delimiter(":")
            yield from text.run(BLANKS)
            name = body.get(self.name_key)
            is_object = (yield from text.peek()) == "{"
            if key in keys and not calls and isinstance(name, str) and is_object:
                calls = yield from self._named_call(name, text)
                if not calls:
                    raise NoCallError
            else:
                body[str(key)] = yield from text.json_value()
            if (yield from text.delimiter(",", "}")) == "}":
                return calls or self._late_call(body, keys, None if needs_arguments else {})
        raise NoCallError

    def _late_call(
        self, body: dict[str, object], keys: tuple[str, ...], default: object
    ) -> Sequence[ToolCall]:
        """The call of an object whose arguments come before its name, or are missing."""
        arguments = next((body[key] for key in keys if key in body), default)
        calls = call_of(body.get(self.name_key), arguments)
        if calls and self.in_pieces:
            self._tell(self._whole(calls[0]))
            self._n_told += 1
        return calls

    def _json_calls(self, text: TextReader, keys: tuple[str, ...]) -> Reading[Sequence[ToolCall]]:
        """The calls of a JSON list of such objects, which comes next."""
        calls: list[ToolCall] = []
        yield from text.delimiter("[")
        while True:
            called = yield from self._json_call(text, keys)
            if not called:
                raise NoCallError
            calls += called
            if (yield from text.delimiter(",", "]")) == "]":
                return calls
