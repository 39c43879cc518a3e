"""The beginning of a conversation, which stays as it is while the conversation goes on."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.prompt.conversation import Conversation

BEGINNING_CHARS = 1024
"""The characters that count of a text that is no chat: it may grow, as a chat does."""


def of_chat(conversation: Conversation) -> str:
    """All up to the user's first message."""
    texts = []
    for turn in conversation:
        texts.append(f"{turn.role} {turn.text}")
        if turn.role == "user":
            break
    return "\n".join(texts)


def of_text(prompt: str | Sequence[int | str]) -> str:
    """The first part of a text, or of as many tokens."""
    if isinstance(prompt, str):
        return prompt[:BEGINNING_CHARS]
    return " ".join(str(part)[:BEGINNING_CHARS] for part in prompt[:BEGINNING_CHARS])
