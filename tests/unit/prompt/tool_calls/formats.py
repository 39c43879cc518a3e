"""What tests of all tool-call formats share: the formats, and real templates that ask for them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.tool_calls import FORMATS, GENERIC, ToolFormat
from serve_app.prompt.tool_calls.format import EXAMPLE_FUNCTIONS

TEMPLATES = sorted((Path(__file__).parents[3] / "data" / "templates").glob("*/*.jinja"))
TOOLS = [{"type": "function", "function": function} for function in EXAMPLE_FUNCTIONS]

every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
every_template = pytest.mark.parametrize(
    "path", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)


def format_of(path: Path) -> ToolFormat:
    """The format that a template's folder names."""
    return next(form for form in (*FORMATS, GENERIC) if form.name == path.parent.name)


@functools.cache
def template_at(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(), bos="<s>", eos="</s>")


def among_content(form: ToolFormat, call: str) -> str:
    """The call as it is written behind content: where it needs no opening, a delimiter makes it one."""
    return call if form.opening else form.delimiters[0] + call
