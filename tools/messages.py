"""Conversations that tools and tests write in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.prompt.conversation import PastCall, Turn


def from_messages(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """The turns of messages in OpenAI's form, whose contents are texts."""
    return [
        Turn(
            message["role"],
            (message["content"],),
            message.get("reasoning_content", ""),
            tuple(
                PastCall(
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    call["id"],
                )
                for call in message.get("tool_calls", ())
            ),
            message.get("tool_call_id", ""),
        )
        for message in messages
    ]
