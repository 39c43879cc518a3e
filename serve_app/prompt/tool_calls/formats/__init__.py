"""The formats of tool calls, and how a chat template shows which one it asks for."""

from __future__ import annotations

import re

from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.formats import channels, json_calls, pythonic

FORMATS = tuple(
    sorted(
        (*channels.FORMATS, *json_calls.FORMATS, *pythonic.FORMATS),
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
