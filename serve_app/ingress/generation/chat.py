"""Splits answers into content, reasoning and tool calls, for every chat protocol."""

from __future__ import annotations

from serve_app.ingress.generation.preparation import Chat
from serve_app.ingress.model_registry import ServedModel
from serve_app.prompt.output_parser import OutputParser, Part, Reasoning
from serve_app.prompt.tool_calls import CallPiece, ToolCall
from serve_app.types import TokenDelta


def parser(model: ServedModel, chat: Chat, *, in_pieces: bool | None = None) -> OutputParser:
    """The parser of one answer to this chat. Calls come in pieces, in streams if nothing is said."""
    in_pieces = chat.generation.stream if in_pieces is None else in_pieces
    return model.tokenizer.output_parser(chat.prompt, chat.tools, chat.thinks, in_pieces=in_pieces)


def parts(parser: OutputParser, delta: TokenDelta) -> list[Part]:
    """The parts of the delta's text that are certain now; none is empty."""
    found = parser.feed(delta.text)
    return found if delta.end is None else found + parser.finish()


def split(parser: OutputParser, delta: TokenDelta) -> list[str | ToolCall | CallPiece]:
    """The same without reasoning."""
    return [part for part in parts(parser, delta) if not isinstance(part, Reasoning)]
