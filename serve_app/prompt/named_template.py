"""A chat template that llama.cpp knows by its name, in the place of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.llama import chat_templates
from serve_app.prompt import tool_calls
from serve_app.prompt.chat_template import Message


class NamedTemplate:
    """See ChatTemplate. It reads roles and texts: no tools, no variables."""

    tool_format = tool_calls.GENERIC
    thinks = False
    names: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self._name = name

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """See ChatTemplate."""
        turns = [(str(message["role"]), str(message["content"])) for message in messages]
        return chat_templates.apply(self._name, turns, add_generation_prompt=add_generation_prompt)
