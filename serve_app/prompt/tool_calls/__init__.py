"""Tool calls in what a model says, in each format that chat templates ask for."""

from serve_app.prompt.tool_calls.calls import CallPiece, Reasoning, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.formats import FORMATS, detect
from serve_app.prompt.tool_calls.formats.generic import GENERIC
from serve_app.prompt.tool_calls.formats.markup import derive
from serve_app.prompt.tool_calls.parser import CallParser

__all__ = [
    "FORMATS",
    "GENERIC",
    "CallParser",
    "CallPiece",
    "Reasoning",
    "ToolCall",
    "ToolFormat",
    "derive",
    "detect",
]
