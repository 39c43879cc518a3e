"""The tools of a chat, which all protocols translate theirs to, and the parts that none can have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from serve_app.base.errors import InvalidRequestError, MediaError
from serve_app.prompt.tool_calls.calls import FunctionNames, describe_function
from serve_app.server.http.request_model import RequestModel

FunctionName = Annotated[str, Field(min_length=1, max_length=128)]
"""A name of a function, in any characters: see `serve_app.prompt.tool_calls.calls`."""


_KINDS = {
    "image": "Image",
    "image_url": "Image",
    "input_image": "Image",
    "audio": "Audio",
    "audio_url": "Audio",
    "input_audio": "Audio",
    "video": "Video",
    "video_url": "Video",
    "input_video": "Video",
    "document": "Document",
    "file": "File",
    "input_file": "File",
    "container_upload": "File",
    "search_result": "Search result",
}
_MEDIA = frozenset({"Image", "Audio", "Video"})


def refuse_media(parts: object, field: str, takes: Set[str] = frozenset()) -> None:
    """Refuse messages with parts that are no text, but for the types that they may have (`takes`). Anything
    but a list of parts is not looked at. Raises MediaError or, for files, InvalidRequestError, in
    llama-server's words."""
    for part in parts if isinstance(parts, list) else ():
        name = part.get("type") if isinstance(part, dict) else None
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is not None and name not in takes:
            error = MediaError if kind in _MEDIA else InvalidRequestError
            raise error(
                f"{kind} input is not supported: a message has a part of the type {name!r}.", field
            )


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; none means no parameters."""
    strict: bool | None = None
    """Whether arguments are held to the schema; where calls are forced, they always are."""

    @field_validator("parameters", mode="before")
    @classmethod
    def _no_parameters(cls, value: object) -> object:
        return None if value in ([], "") else value


class Tool(RequestModel):
    """A tool in `tools`."""

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition
    """The function; of a custom tool, the one that stands for it."""

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": describe_function(self.function.model_dump())}


class LaterTools:
    """The tools that the turns of a chat make known, or take back.

    The model reads of them where the turns say so: the prompt's front stays as it was, and is not computed
    again."""

    def __init__(self, declared: Iterable[Tool] = (), left_out: Set[str] = frozenset()) -> None:
        """Turns may refer to the tools that are declared, by their names. Of those that are left out, they
        make nothing known."""
        self._declared = {tool.function.name: tool for tool in declared}
        self._names = FunctionNames(self._declared)
        self.left_out = left_out
        self.known: dict[str, Tool] = {}
        """The known tools that are not taken back, by their names."""
        self.removed: set[str] = set()
        """The names of the tools that are taken back."""

    def find(self, name: str) -> Tool | None:
        """The tool that was declared, or defined by an earlier turn."""
        return self._declared.get(name)

    def add(self, tools: Iterable[Tool]) -> str:
        """The text that tells the model of the tools, in the form that Claude Code's search promises."""
        lines = []
        for tool in tools:
            name = tool.function.name
            self._declared[name] = self.known[name] = tool
            self._names.add(name)
            self.removed.discard(name)
            described = describe_function(tool.function.model_dump())
            ordered = {
                "description": described["description"],
                "name": self._names.of_model(name),
                "parameters": described["parameters"],
            }
            lines.append(f"<function>{json.dumps(ordered, ensure_ascii=False)}</function>")
        return "\n".join(["<functions>", *lines, "</functions>"])

    def remove(self, names: Iterable[str]) -> str:
        """The text that takes the tools back from here on."""
        names = list(names)
        self.removed.update(names)
        for name in names:
            self.known.pop(name, None)
        listed = ", ".join(map(self._names.of_model, names))
        return f"These functions can no longer be called: {listed}"
