"""The chat templates that llama.cpp has built in, by name.

Source: llama.cpp, `llama_chat_apply_template` and `llama_chat_builtin_templates` in include/llama.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import llama_cpp

from serve_app.base.errors import InvalidRequestError

# More than there are.
_MOST_NAMES = 256


@functools.cache
def names() -> frozenset[str]:
    """`llama3`, `command-r`, `chatml` and others."""
    found = (ctypes.c_char_p * _MOST_NAMES)()
    n = llama_cpp.llama_chat_builtin_templates(found, _MOST_NAMES)
    return frozenset(name.decode() for name in found[: min(n, _MOST_NAMES)] if name)


def apply(name: str, turns: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str:
    """The text of these turns, roles and what they say. Raises InvalidRequestError if there is none."""
    messages = [llama_cpp.llama_chat_message(role.encode(), text.encode()) for role, text in turns]
    chat = (llama_cpp.llama_chat_message * len(messages))(*messages)

    def render(buffer: Any, size: int) -> int:
        n_bytes: int = llama_cpp.llama_chat_apply_template(
            name.encode(), chat, len(chat), add_generation_prompt, buffer, size
        )
        if n_bytes < 0:
            raise InvalidRequestError("The chat template cannot render these messages.", "messages")
        return n_bytes

    size = render(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    render(buffer, size)
    return buffer.raw[:size].decode(errors="replace")
