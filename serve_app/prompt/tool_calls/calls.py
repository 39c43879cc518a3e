"""Tool calls, how they are made from the JSON that a model wrote, and the names of functions in them.

Protocols allow characters in names that the formats of calls do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.prompt.conversation import Conversation, PastCall

Function = Mapping[str, Any]
"""A function as OpenAI describes it: `name`, and `parameters`, a JSON schema, if there are any."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call, where calls are told in pieces."""

    name: str | None
    """The function's name, with the first piece of a call; the next pieces go on with its arguments."""
    arguments: str
    """A piece of a JSON object's text, which is whole unless the answer is cut short or goes wrong."""


def call_of(name: object, arguments: object) -> list[ToolCall]:
    """The call; none if these are no name and no JSON object, or cannot be written as JSON again."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return []
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinities, half characters
        return []
    return [ToolCall(name, text)]


_UNSAFE = re.compile(r"[^\w.-]")


class FunctionNames:
    """The names of one chat's functions, the client's and the model's."""

    def __init__(self, names: Iterable[str]) -> None:
        self._of_model: dict[str, str] = {}
        self._of_client: dict[str, str] = {}
        for name in sorted(names, key=lambda name: _safe(name) != name):
            self.add(name)

    @classmethod
    def of_tools(cls, tools: Iterable[Mapping[str, Any]]) -> FunctionNames:
        """The names of tools as OpenAI describes them."""
        return cls(tool["function"]["name"] for tool in tools)

    def add(self, name: str) -> None:
        """Give one more function a name, if it has none."""
        if name not in self._of_model:
            safe, number, unused = _safe(name), 2, _safe(name)
            while unused in self._of_client:
                unused, number = f"{safe}_{number}", number + 1
            self._of_model[name], self._of_client[unused] = unused, name

    def of_model(self, name: str) -> str:
        """The name that the model reads and writes for the client's."""
        return self._of_model.get(name) or _safe(name)

    def of_client(self, name: str) -> str:
        """The client's name for the name that the model wrote. Models write some names in another case,
        between blanks, or behind `functions.`; a name that then means one function only is that one's."""
        if name in self._of_client or not self._of_client:
            return self._of_client.get(name, name)
        like = [own for safe, own in self._of_client.items() if _plain(safe) == _plain(name)]
        return like[0] if len(like) == 1 else name

    def rename(self, tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [
            {
                **tool,
                "function": {**tool["function"], "name": self.of_model(tool["function"]["name"])},
            }
            for tool in tools
        ]

    def renamed_calls(self, conversation: Conversation) -> Conversation:
        """The conversation with the model's names in its calls and their results."""
        return [
            replace(
                turn, calls=self._calls(turn.calls), name=self._of_model.get(turn.name, turn.name)
            )
            if turn.calls or turn.role == "tool"
            else turn
            for turn in conversation
        ]

    def _calls(self, calls: Sequence[PastCall]) -> tuple[PastCall, ...]:
        return tuple(replace(call, name=self.of_model(call.name)) for call in calls)


def _safe(name: str) -> str:
    return _UNSAFE.sub("_", name) or "_"


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("functions.").replace("-", "_")


def describe_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat templates read it: with a text as its description, and an object as its
    parameters. Fields that are null are left out, as templates take a missing field for an empty one."""
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": without_nulls(function.get("parameters") or {}),
    }


def without_nulls(schema: Any) -> Any:
    """The schema without fields that are null, except where null is a value, and with types as JSON Schema
    writes them: Google's clients write `STRING`."""
    if isinstance(schema, list):
        return [without_nulls(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    named = {"type": kind.lower()} if isinstance(kind, str) else {}
    kept = {
        key: value if key in ("const", "default", "enum", "examples") else without_nulls(value)
        for key, value in schema.items()
        if value is not None or key in ("const", "default")
    }
    return kept | named
