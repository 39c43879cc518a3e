"""The canonical form of a chat: every protocol turns its body into it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""The roles by the names that clients have for them."""
_NO_TAG = re.compile(r"[^\w-]+")


@dataclass(frozen=True, slots=True)
class Attachment:
    url: str
    is_sound: bool = False


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call in an earlier turn: history, which nothing validates."""

    name: str
    arguments: str = ""
    """The text that the client sent, which need not be JSON."""
    call_id: str = ""
    """The client's name of the call; empty if the protocol has none."""

    @classmethod
    def of(cls, name: str, arguments: object, call_id: str = "") -> Self:
        """A call whose arguments may be any JSON value: clients send them as they are."""
        return cls(name, json_text(arguments), call_id)

    @property
    def value(self) -> Any:
        """The arguments as an object if they are one, and else as the text that they are."""
        value = {} if self.arguments in ("", "null") else json_object(self.arguments)
        return self.arguments if value is None else value


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of any role."""

    role: Role
    parts: tuple[str | Attachment, ...] = ()
    """Texts, pictures and sounds in their order."""
    reasoning: str = ""
    """The reasoning of an assistant's turn."""
    calls: tuple[PastCall, ...] = ()
    """The calls of an assistant's turn."""
    call_id: str = ""
    """The call that a tool's result answers; empty if the client does not say."""
    name: str = ""
    """The function that a tool's result is of, or the speaker's name."""

    @classmethod
    def of(cls, role: str, parts: tuple[str | Attachment, ...], **fields: Any) -> Self:
        """A turn of a client's role, in any case. A role that nobody knows becomes a user's turn in which
        the role's name stands around the content."""
        known = _ROLES.get(role.lower())
        return cls(known or "user", parts if known else in_tags(role, *parts), **fields)

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts that are texts."""
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def text(self) -> str:
        """The content as one text: its parts are lines."""
        return "\n".join(self.texts)

    @property
    def attachments(self) -> list[Attachment]:
        """The pictures and sounds among the parts."""
        return [part for part in self.parts if isinstance(part, Attachment)]

    def with_text(self, text: str) -> Turn:
        """The turn with this text as its whole content."""
        return dataclasses.replace(self, parts=(text,))

    def with_marks(self, mark: Callable[[], str]) -> Turn:
        """The turn with a mark in the place of each attachment. A mark is part of the texts beside it, so
        that no line ends there, as at llama-server."""
        texts, after_text = list[str](), True
        for part in self.parts:
            is_text = isinstance(part, str)
            text = part if isinstance(part, str) else mark()
            if texts and not (is_text and after_text):
                texts[-1] += text
            else:
                texts.append(text)
            after_text = is_text
        return dataclasses.replace(self, parts=tuple(texts))


Conversation = Sequence[Turn]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is; None if it is none. Halves of characters become question marks."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_text(value: object) -> str:
    """The text itself, or the value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_tags(role: str, *parts: str | Attachment) -> tuple[str | Attachment, ...]:
    """The content of a role that a template does not take, as it stands in a user's turn."""
    tag = _NO_TAG.sub("_", role)[:64]
    return f"<{tag}>", *parts, f"</{tag}>"


_TEXT_FIELDS = (
    *("text", "refusal", "thinking", "summary", "code", "content", "stdout", "stderr"),
    *("output", "outputs", "results", "logs", "value"),
)
"""The fields in which items and blocks of all protocols carry texts for a model."""


def texts_in(value: object) -> Iterator[str]:
    """The texts that a part, an item or a list of such carries."""
    if isinstance(value, str):
        yield from (value,) if value else ()
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, dict):
        for name in _TEXT_FIELDS:
            yield from texts_in(value.get(name))


def text_of(value: object) -> str:
    """The texts that content carries, as lines, or else its JSON: clients send results as they are."""
    texts = list(texts_in(value))
    if texts or value in (None, "", [], {}):
        return "\n".join(texts)
    return json_text(value)
