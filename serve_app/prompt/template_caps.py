"""A chat template's abilities, found by rendering probes.

Source of those that llama-server reports as `chat_template_caps`: llama.cpp, common/jinja/caps.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serve_app.base.errors import InvalidRequestError


class Render(Protocol):
    """Messages, tools and more variables as a prompt. Raises InvalidRequestError."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> str: ...


_TEXT, _OTHER, _TOOL, _FIRST, _SECOND, _VALUE = "Wzqa", "Wzqf", "wzqb", "wzqc", "wzqd", "wzqe"
"""Words that no template has."""
_KEY = re.compile(r"['\"]type['\"]:")
_ASKED = {"role": "user", "content": "Hello"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {"arg": {"type": "string", "description": "An argument"}},
                "required": ["arg"],
            },
        },
    }
]
# Variables by which templates are told to leave reasoning where it is.
_KEEP = {
    "enable_thinking": True,
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class TemplateCaps:
    """The parts of messages that a template takes: it renders them."""

    string_content: bool = True
    typed_content: bool = False
    """A user's content as a list of parts."""
    joining_roles: frozenset[str] = frozenset()
    """The roles whose lists of texts it joins."""
    joint: str = "\n"
    """The text between two parts, as it joins them; a line end if it joins none, as at llama-server and
    vLLM."""
    tools: bool = False
    tool_calls: bool = False
    parallel_calls: bool = False
    """Several calls in one turn."""
    calls_beside_content: bool = True
    """Content and calls in one turn."""
    object_arguments: bool = False
    """Arguments of calls as an object."""
    text_arguments: bool = True
    """Arguments of calls as a text that need not be JSON."""
    preserve_reasoning: bool = False
    reasoning_part: bool = False
    """Reasoning as a part of the content, and nowhere else."""
    reasoning_effort: bool = False
    system: bool = True
    """A system message before a user's turn."""

    def content(self, *texts: str, role: str = "user") -> str | list[dict[str, str]]:
        """The texts as the content of such a role's message: the template joins them if it can."""
        joins = len(texts) > 1 and role in self.joining_roles
        if joins or (self.typed_content and not self.string_content):
            return [{"type": "text", "text": text} for text in texts]
        return self.joint.join(texts)

    def report(self) -> dict[str, bool]:
        """The abilities in llama-server's words."""
        return {
            "supports_string_content": self.string_content,
            "supports_typed_content": self.typed_content,
            "supports_tools": self.tools,
            "supports_tool_calls": self.tool_calls,
            "supports_parallel_tool_calls": self.parallel_calls,
            "supports_system_role": self.system,
            "supports_preserve_reasoning": self.preserve_reasoning,
            "supports_reasoning_effort": self.reasoning_effort,
            "supports_object_arguments": self.object_arguments,
        }


def probe(render: Render, names: frozenset[str]) -> TemplateCaps:
    """The abilities of a template that reads variables of these names."""

    def prompt(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] = _NOTHING,
    ) -> str:
        try:
            return render(messages, tools, extra=extra)
        except InvalidRequestError:
            return ""

    def joint(*messages: Mapping[str, Any], **options: Any) -> str | None:
        """The text that it writes between the two texts of a list; None if it takes none. It may print
        a list as Python or JSON have it."""
        text = prompt(messages, **options)
        found = re.search(f"{_TEXT}(.*?){_OTHER}", text, re.DOTALL)
        return found[1] if found and not _KEY.search(text) else None

    parts = {"content": [{"type": "text", "text": text} for text in (_TEXT, _OTHER)]}
    called, result = _turns_with_calls({"arg": _VALUE}, _FIRST)[1:3]
    joints = {
        "user": joint(_ASKED | parts),
        "system": joint({"role": "system"} | parts, _ASKED),
        "assistant": joint(_ASKED, {"role": "assistant"} | parts, _ASKED),
        "tool": joint(_ASKED, called, result | parts, tools=_TOOLS),
    }
    content = TemplateCaps(
        string_content=_TEXT in prompt([_ASKED | {"content": _TEXT}]),
        typed_content=joints["user"] is not None,
        joining_roles=frozenset(role for role, between in joints.items() if between is not None),
        joint=next((between for between in joints.values() if between is not None), "\n"),
    )

    def write(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        formed = [{**turn, "content": content.content(turn["content"])} for turn in messages]
        return prompt(formed, **options)

    first = write(_turns_with_calls({"arg": _VALUE}, _FIRST), tools=_TOOLS)
    takes_objects = _VALUE in first
    arguments = {"arg": _VALUE} if takes_objects else f'{{"arg": "{_VALUE}"}}'
    first = first if takes_objects else write(_turns_with_calls(arguments, _FIRST), tools=_TOOLS)
    second = write(_turns_with_calls(arguments, _FIRST, _SECOND), tools=_TOOLS)
    beside = write(_turns_with_calls(arguments, _FIRST, content=_TEXT), tools=_TOOLS)
    after_system = write([{"role": "system", "content": _TEXT}, _ASKED])
    thought = {"type": "thinking", "thinking": _OTHER}
    said = [_ASKED, _answer_turn(_OTHER)]
    in_part = prompt([_ASKED, said[1] | {"content": [thought, {"type": "text", "text": _TEXT}]}])
    past = [_ASKED, _answer_turn(_TEXT), _ASKED, _answer_turn("Hm"), _ASKED]
    return replace(
        content,
        tools=_TOOL in first or _TOOL in write([_ASKED], tools=_TOOLS),
        tool_calls=_FIRST in first,
        parallel_calls=_SECOND in second,
        calls_beside_content=all(text in beside for text in (_FIRST, _TEXT)),
        object_arguments=takes_objects,
        text_arguments=_VALUE in write(_turns_with_calls(_VALUE, _FIRST), tools=_TOOLS),
        system=all(text in after_system for text in (_TEXT, _ASKED["content"])),
        preserve_reasoning=_TEXT in write(past, extra=_KEEP),
        reasoning_part=all(text in in_part for text in (_OTHER, _TEXT))
        and not _KEY.search(in_part)
        and _OTHER not in write(said),
        reasoning_effort=not names.isdisjoint(("reasoning_effort", "reasoning_strength")),
    )


def calls_of(called: Iterable[tuple[str, object]]) -> list[dict[str, Any]]:
    """Calls of these names with these arguments, as templates take them. Their ids are `call00000` and so
    on, which Mistral's templates take, too."""
    return [
        {
            "id": f"call{i:05}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for i, (name, arguments) in enumerate(called)
    ]


def _turns_with_calls(arguments: object, *names: str, content: str = "") -> list[dict[str, Any]]:
    calls = calls_of((name, arguments) for name in names)
    return [
        _ASKED,
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "Result", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "Done"},
        _ASKED,
    ]


def _answer_turn(reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "Yes", "reasoning_content": reasoning}
