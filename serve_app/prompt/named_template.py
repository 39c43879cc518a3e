"""The chat templates that llama.cpp knows by name: `llama3`, `command-r`, `chatml` and others.

Source: llama.cpp, `llama_chat_apply_template` and `llama_chat_builtin_templates` in include/llama.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from serve_app.errors import InvalidRequestError
from serve_app.prompt.chat_template import Message

# The source of the longest one has less.
_MOST_NAMES = 256


@functools.cache
def names() -> frozenset[str]:
    """The templates' names."""
    found = (ctypes.c_char_p * _MOST_NAMES)()
    n = llama_cpp.llama_chat_builtin_templates(found, _MOST_NAMES)
    return frozenset(name.decode() for name in found[: min(n, _MOST_NAMES)] if name)


class NamedTemplate:
    """See ChatTemplate. It takes roles and texts only: no tools, no variables."""

    tool_format = None
    thinks = False

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """See ChatTemplate."""
        turns = [
            llama_cpp.llama_chat_message(str(m["role"]).encode(), str(m["content"]).encode())
            for m in messages
        ]
        chat = (llama_cpp.llama_chat_message * len(turns))(*turns)
        size = self._apply(chat, add_generation_prompt, None, 0)
        buffer = ctypes.create_string_buffer(size + 1)
        self._apply(chat, add_generation_prompt, buffer, size)
        return buffer.raw[:size].decode(errors="replace")

    def _apply(self, chat: Any, ends: bool, buffer: Any, size: int) -> int:
        made = llama_cpp.llama_chat_apply_template(self._name, chat, len(chat), ends, buffer, size)
        if made < 0:
            raise InvalidRequestError("The chat template cannot render these messages.", "messages")
        return int(made)
