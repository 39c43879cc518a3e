"""Splits answers into content, reasoning and tool calls, for every chat protocol."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.ingress.generation.preparation import Chat
from serve_app.ingress.model_registry import ServedModel
from serve_app.prompt.output_parser import OutputParser, Part
from serve_app.types import TokenDelta


def parser(model: ServedModel, chat: Chat, *, in_pieces: bool | None = None) -> OutputParser:
    """The parser of one answer to this chat. Calls come in pieces, or by default in streams, if no tool
    takes a text that its arguments must be read for."""
    by_default = chat.generation.stream and not chat.custom_tools
    in_pieces = by_default if in_pieces is None else in_pieces
    return model.tokenizer.output_parser(chat.prompt, chat.tools, chat.thinks, in_pieces=in_pieces)


def counter(model: ServedModel) -> Callable[[str], int]:
    """A function that counts the tokens of a text."""
    return lambda text: len(model.tokenizer.tokenize(text, False, False))


def parts(parser: OutputParser, delta: TokenDelta) -> list[Part]:
    """The parts of the delta's text that are certain now; none is empty."""
    found = parser.feed(delta.text)
    return found if delta.end is None else found + parser.finish()
