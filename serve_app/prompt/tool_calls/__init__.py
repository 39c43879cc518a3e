"""Tool calls in what a model says, in each format that chat templates ask for."""

import re

from serve_app.prompt.tool_calls.calls import CallPiece, Reasoning, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.formats import channels, json_calls
from serve_app.prompt.tool_calls.formats.generic import GENERIC
from serve_app.prompt.tool_calls.formats.markup import derived
from serve_app.prompt.tool_calls.parser import CallParser

__all__ = [
    "FORMATS",
    "GENERIC",
    "CallParser",
    "CallPiece",
    "Reasoning",
    "ToolCall",
    "ToolFormat",
    "derived",
    "detect",
]

FORMATS = tuple(
    sorted(
        (*channels.FORMATS, *json_calls.FORMATS),
        key=lambda form: (-len(form.template_patterns), form.name),
    )
)
"""All formats that templates ask for. Formats that ask more of a template are before others."""


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None if it is none of these."""
    asked = (
        form
        for form in FORMATS
        if all(re.search(pattern, template) for pattern in form.template_patterns)
    )
    return next(asked, None)
