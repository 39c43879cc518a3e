"""The beginning of a conversation, which stays as it is while the conversation goes on."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.ingress.generation.messages import ChatMessage

BEGINNING_CHARS = 1024
"""The characters that count of a text that is no chat: it may grow, as a chat does."""


def of_chat(messages: Sequence[ChatMessage]) -> str:
    """All up to the user's first message."""
    texts = []
    for message in messages:
        texts.append(f"{message.role} {message.text}")
        if message.role == "user":
            break
    return "\n".join(texts)


def of_text(prompt: str | Sequence[int | str]) -> str:
    """The first part of a text, or of as many tokens."""
    if isinstance(prompt, str):
        return prompt[:BEGINNING_CHARS]
    return " ".join(str(part)[:BEGINNING_CHARS] for part in prompt[:BEGINNING_CHARS])
