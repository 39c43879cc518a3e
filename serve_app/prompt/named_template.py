"""A chat template that llama.cpp knows by its name, in the place of a source."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.llama import chat_templates
from serve_app.prompt import template_caps, tool_calls
from serve_app.prompt.chat_template import Message
from serve_app.prompt.template_caps import TemplateCaps
from serve_app.prompt.template_text import TemplateText


class NamedTemplate:
    """A template with the interface of ChatTemplate. It reads roles and texts: no tools, no variables."""

    tool_format = tool_calls.GENERIC
    thinks = False
    reasoning_tags = None
    names: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self._name = name

    @functools.cached_property
    def caps(self) -> TemplateCaps:
        """The abilities of the template."""
        return template_caps.probed(self.render, self.names)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        """The prompt. Digits that no user foresees stand for the texts while llama.cpp renders, so that it
        shows what the template wrote. Raises InvalidRequestError."""
        secret = f"{secrets.randbelow(10**12):012}"
        turns = [
            (str(message["role"]), f"{secret}<{place}>" if message["content"] else "")
            for place, message in enumerate(messages)
        ]
        rendered = chat_templates.apply(
            self._name, turns, add_generation_prompt=add_generation_prompt
        )
        parts = re.split(rf"{secret}<(\d+)>", rendered)
        return TemplateText.joined(
            str(messages[int(part)]["content"]) if place % 2 else TemplateText.own(part)
            for place, part in enumerate(parts)
        )
