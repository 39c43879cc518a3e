"""The tools of requests for responses, and the forms of their calls.

Models know functions only. Tools of other kinds that a client runs itself are offered as functions, and
their calls and outputs are translated both ways. Tools that only OpenAI's servers run are left out.

Source: OpenAI's API reference, "Responses", `tools` and `input`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from serve_app.prompt.conversation import json_object
from serve_app.server.answering.openai_tools import CustomDefinition, input_of, known_tools
from serve_app.server.answering.tools import FunctionDefinition, FunctionName, Tool
from serve_app.server.http.request_model import RequestModel, name_ignored

Json = dict[str, Any]
SEPARATOR = "__"
"""The text between the name of a namespace and a function's."""
_TEXT, _TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _parameters(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_FUNCTIONS = {
    "local_shell": (
        "Runs a command on the user's machine and returns its output.",
        _parameters(("command",), command=_TEXTS, working_directory=_TEXT, timeout_ms=_COUNT),
    ),
    "shell": (
        "Runs shell commands on the user's machine and returns their outputs.",
        _parameters(("commands",), commands=_TEXTS, timeout_ms=_COUNT, max_output_length=_COUNT),
    ),
    "apply_patch": (
        "Creates, changes or deletes a file. The diff of a changed file is in the V4A format: lines"
        " that begin with a blank, with - or with +, in sections that begin with @@.",
        _parameters(
            ("type", "path"),
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
}
"""The functions that stand for the tools whose type says all."""


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "async": (None, False),
    "allowed_callers": (None, [], ["direct"], ["direct", "programmatic"]),
}
"""Fields of tools that ask for what happens anyway at these values."""


class FunctionTool(FunctionDefinition):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    INERT: ClassVar[frozenset[str]] = frozenset({"output_schema"})

    type: Literal["function"]
    defer_loading: bool = False
    """Whether the model knows the function only from the result of a search on."""


class CustomTextTool(CustomDefinition):
    """A tool of the client that takes a text."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    type: Literal["custom"]
    defer_loading: bool = False
    """Whether the model knows the tool only from the result of a search on."""


class ShellEnvironment(RequestModel):
    """The place where a shell's commands run: the client's."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"skills": (None, [])}

    type: Literal["local"]


class ClientTool(RequestModel):
    """A tool that the client runs, and whose type says all."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    type: Literal["local_shell", "shell", "apply_patch"]
    environment: ShellEnvironment | None = None


class SearchTool(RequestModel):
    """The client's search for tools that are deferred."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    """Searches that OpenAI's servers run are left out, and no tool is deferred then."""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamespaceTool(RequestModel):
    """Functions with one name before theirs."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTextTool, Field(discriminator="type")]],
        BeforeValidator(lambda tools: known_tools(("function", "custom"), tools)),
    ] = Field(default=[])


def _flat(tools: object) -> object:
    """The tools that this module knows, each with its fields beside its type, also if they are a chat's."""
    if isinstance(tools, list):
        searches = [
            tool for tool in tools if isinstance(tool, dict) and tool.get("type") == _SEARCH
        ]
        of_servers = [tool for tool in searches if tool.get("execution") != "client"]
        name_ignored("tools.tool_search" for _ in of_servers)
        tools = [tool for tool in tools if tool not in of_servers]
        if len(of_servers) == len(searches):
            tools = [_without_deferral(tool) for tool in tools]
    known = known_tools(_KINDS, tools)
    if not isinstance(known, list):
        return known
    return [_with_fields_beside_type(tool) for tool in known]


def _without_deferral(tool: object) -> object:
    """The tool as one that the model knows at once: nobody would find it."""
    if not isinstance(tool, dict):
        return tool
    inner = tool.get("tools")
    more = {"tools": [_without_deferral(one) for one in inner]} if isinstance(inner, list) else {}
    return {name: value for name, value in tool.items() if name != "defer_loading"} | more


def _with_fields_beside_type(tool: object) -> object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    fields = tool.get(kind) if isinstance(tool, dict) and isinstance(kind, str) else None
    return {"type": kind, **fields} if isinstance(fields, dict) else tool


_SEARCH = "tool_search"
_KINDS = ("function", "custom", "namespace", _SEARCH, *_FUNCTIONS)
AnyTool = Annotated[
    FunctionTool | CustomTextTool | ClientTool | NamespaceTool | SearchTool,
    Field(discriminator="type"),
]
Tools = Annotated[list[AnyTool], BeforeValidator(_flat)]


def functions(tools: Iterable[AnyTool], *, deferred: bool = True) -> Iterator[Tool]:
    """The tools as functions; without `deferred`, those that the model knows at once."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                form = CallForm(inner.type, inner.name, tool.name)
                if deferred or not inner.defer_loading:
                    yield _function(inner, form.function)
        elif isinstance(tool, SearchTool):
            yield Tool(
                function=FunctionDefinition(
                    name=tool.type,
                    description=tool.description or "Searches for tools.",
                    parameters=tool.parameters,
                )
            )
        elif isinstance(tool, ClientTool):
            description, parameters = _FUNCTIONS[tool.type]
            yield Tool(
                function=FunctionDefinition(
                    name=tool.type, description=description, parameters=parameters
                )
            )
        elif deferred or not tool.defer_loading:
            yield _function(tool, tool.name)


def _function(tool: FunctionTool | CustomTextTool, name: str) -> Tool:
    function = tool.as_function() if isinstance(tool, CustomTextTool) else tool
    # A copy is not validated: with its namespace, the name may be longer than a client's.
    return Tool(function=function.model_copy(update={"name": name}))


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which calls of a tool are given back, and come in the input."""

    kind: Literal["function", "custom", "tool_search", "local_shell", "shell", "apply_patch"]
    name: str
    namespace: str | None = None

    @classmethod
    def of_item(cls, item_type: str, name: str, namespace: str | None) -> CallForm:
        """The form of an item of this type, such as `custom_tool_call`."""
        kind: Any = item_type.removesuffix("_call").removesuffix("_tool")
        return cls(kind, name or kind, namespace)

    @property
    def function(self) -> str:
        if not self.namespace:
            return self.name
        return f"{self.namespace.removesuffix(SEPARATOR)}{SEPARATOR}{self.name}"

    @property
    def item_type(self) -> str:
        return "custom_tool_call" if self.kind == "custom" else f"{self.kind}_call"

    def fields(self, arguments: str) -> Json:
        """The fields of a call's item that say what is called."""
        named: Json = {"name": self.name}
        if self.namespace is not None:
            named["namespace"] = self.namespace
        if self.kind == "function":
            return {**named, "arguments": arguments}
        if self.kind == "custom":
            return {**named, "input": input_of(arguments)}
        values = json_object(arguments) or {}
        if self.kind == "tool_search":
            return {"execution": "client", "arguments": values}
        if self.kind == "apply_patch":
            return {"operation": {"type": "update_file", "path": "", "diff": "", **values}}
        if self.kind == "shell":
            bounds = {"timeout_ms": None, "max_output_length": None}
            return {"action": {"commands": [], **bounds, **values}}
        return {"action": {"type": "exec", "command": [], "env": {}, **values}}


def forms(tools: Iterable[Mapping[str, Any]]) -> dict[str, CallForm]:
    """The forms of the calls of a response's tools, as the response repeats these, by functions' names."""
    call_forms = []
    for tool in tools:
        kind, name = tool["type"], tool.get("name", tool["type"])
        if kind == "namespace":
            call_forms += [CallForm(one["type"], one["name"], name) for one in tool["tools"]]
        else:
            call_forms.append(CallForm(kind, name))
    return {form.function: form for form in call_forms}
