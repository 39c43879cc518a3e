"""The turns and tools of a chat as Anthropic's clients send them.

A client's own tools have a schema, or a type for which Anthropic's models know one: that schema is written
here. Tools of other types are run by Anthropic's servers. Agents declare them with every request, needed or
not. They are left out, and the answer names them.

Tools with `defer_loading` are known from where a `tool_reference` names them. A `tool_addition` or a
`tool_removal` in a system message counts from there on.

Source: Anthropic's API reference, "Messages" and "Tools".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from serve_app.base.errors import FieldRefusedError, InvalidRequestError
from serve_app.prompt.conversation import Attachment, PastCall, Turn, text_of, texts_in
from serve_app.server.answering.tools import (
    FunctionDefinition,
    FunctionName,
    LaterTools,
    Tool,
    refuse_media,
)
from serve_app.server.http.request_model import (
    AnyMember,
    Foreign,
    RequestModel,
    known_kind,
    name_ignored,
)


class Block(RequestModel):
    """A block of content. Prompts are cached anyway, so where to cache says nothing new."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "citations": (None, []),
        "caller": (None, {"type": "direct"}),
        "toolset_name": (None,),
    }
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str = ""


class PictureSource(RequestModel):
    """The place of a picture."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str = ""
    """The picture in base64."""
    url: str = ""

    @property
    def as_url(self) -> str:
        return self.url if self.type == "url" else f"data:;base64,{self.data}"


class PictureBlock(Block):
    """A picture."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Block.NEUTRAL,
        "transformations": (None, {}, {"oversized_image": "downsize"}),
    }

    type: Literal["image"]
    source: PictureSource


class ReferenceBlock(Block):
    """A tool that a search has found."""

    type: Literal["tool_reference"]
    tool_name: str


_TAGS = {
    "redacted_thinking": "thinking",
    "tool_addition": "tool_change",
    "tool_removal": "tool_change",
}


def _kind(block: Any) -> str:
    kind = known_kind(
        *("text", "image", "tool_use", "tool_result", "thinking"),
        *("tool_reference", "tool_search_tool_result", *_TAGS),
    )(block)
    return _TAGS.get(kind, kind)


def _blocks(content: object) -> object:
    """Content as a list of blocks. A text is short for one block of it. Documents and search results that
    are texts are blocks of text. Other media are refused by their names."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    content = [content] if isinstance(content, dict) else content
    if not isinstance(content, list):
        return content
    blocks = [_as_text(block) for block in content if block is not None]
    refuse_media(blocks, "messages", takes={"image"})
    return blocks


def _as_text(block: object) -> object:
    if isinstance(block, str) or (isinstance(block, dict) and "type" not in block):
        return {"type": "text", "text": text_of(block)}
    kind, source = (block.get("type"), block.get("source")) if isinstance(block, dict) else ("", "")
    if kind == "search_result":
        return {"type": "text", "text": "\n".join(texts_in(block))}
    if (
        kind == "document"
        and isinstance(source, dict)
        and source.get("type") in ("text", "content")
    ):
        texts = [source.get("data"), *texts_in(source.get("content"))]
        return {"type": "text", "text": "\n".join(text for text in texts if isinstance(text, str))}
    return block


Texts = Annotated[
    list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])
]
_Seen = list[
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[PictureBlock, Tag("image")]
        | Annotated[ReferenceBlock, Tag("tool_reference")]
        | Annotated[Foreign, Tag("foreign")],
        Discriminator(known_kind("text", "image", "tool_reference")),
        AnyMember,
    ]
]


def _canonical_parts(blocks: Iterable[object], later: LaterTools) -> tuple[str | Attachment, ...]:
    parts: list[str | Attachment] = []
    for is_reference, run in groupby(blocks, lambda block: isinstance(block, ReferenceBlock)):
        if is_reference:
            parts.append(_refer(later, run))
            continue
        for block in run:
            if isinstance(block, PictureBlock):
                parts.append(Attachment(block.source.as_url))
            elif isinstance(block, SearchResultBlock | ToolChangeBlock):
                parts.append(block.tell(later))
            elif isinstance(block, TextBlock | Foreign):
                parts.append(block.text)
    return tuple(part for part in parts if part)


def _refer(later: LaterTools, blocks: Iterable[object]) -> str:
    """The text of a search's result. Histories may name tools that are no longer there."""
    names = [block.tool_name for block in blocks if isinstance(block, ReferenceBlock)]
    found = {name: later.find(name) for name in dict.fromkeys(names)}
    known = [tool for tool in found.values() if tool is not None]
    gone = [f"The function {name} is no longer there." for name in found if found[name] is None]
    return "\n".join([*([later.add(known)] if known else []), *gone])


class SearchResult(RequestModel):
    """The tools that a search of Anthropic's servers found, or its error."""

    type: str
    tool_references: list[ReferenceBlock] = Field(default=[])
    error_code: str | None = None
    error_message: str | None = None


class SearchResultBlock(Block):
    """The result of a search of Anthropic's servers, in an earlier turn."""

    type: Literal["tool_search_tool_result"]
    tool_use_id: str = ""
    content: SearchResult

    def tell(self, later: LaterTools) -> str:
        return _refer(later, self.content.tool_references)


class ToolUseBlock(Block):
    """A call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: str = ""
    name: str = ""
    input: Any = None

    def as_call(self) -> PastCall:
        return PastCall.of(self.name, self.input, self.id)


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: Annotated[_Seen, BeforeValidator(_blocks, json_schema_input_type=str | _Seen)] = Field(
        default=[]
    )
    is_error: bool = False

    def as_turn(self, later: LaterTools) -> Turn:
        """The result as a turn. Templates know no errors, so the text says it."""
        parts = _canonical_parts(self.content, later)
        has_tools = any(isinstance(block, ReferenceBlock) for block in self.content)
        texts = (part for part in parts if isinstance(part, str))
        text = ("\n" if has_tools else "").join(texts)
        text = ("Error: " if self.is_error else "") + text
        pictures = [part for part in parts if isinstance(part, Attachment)]
        return Turn("tool", (text, *pictures), call_id=self.tool_use_id)


class ThinkingBlock(BaseModel):
    """Reasoning of an earlier turn. Redacted thinking cannot be read; signatures are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


Json = dict[str, Any]
_TEXT = {"type": "string"}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_LINE = {"type": "integer", "minimum": 0}


def _schema(commands: tuple[str, ...] = (), **properties: Json) -> Json:
    command = {"enum": list(commands)} if commands else _TEXT
    required = ["command"] if commands else []
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": required,
    }


_EDITOR = ("view", "create", "str_replace", "insert")
_FILE: Mapping[str, Json] = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "view_range": _RANGE,
    "insert_line": _LINE,
}
_KNOWN: Mapping[str, tuple[str, Json]] = {
    "bash": (
        "Runs a command in a shell that stays open. `restart` begins a new shell.",
        _schema(restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and changes files: `str_replace` replaces `old_str`, which must be there once, by"
        " `new_str`; `insert` adds `insert_text` after a line.",
        _schema(_EDITOR, **_FILE),
    ),
    "memory": (
        "Views, creates, changes, deletes and renames files in the folder /memories.",
        _schema((*_EDITOR, "delete", "rename"), **_FILE, old_path=_TEXT, new_path=_TEXT),
    ),
}
"""The client's tools whose types, without their dates, are known to Anthropic's models."""
_DATED = re.compile(r"(.+)_[0-9]{8}")


class AnthropicTool(RequestModel):
    """A tool in `tools`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "input_examples": (None, []),
    }
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(default={})
    strict: bool | None = None
    """Whether the input is held to the schema."""
    defer_loading: bool = False
    """Whether the model knows the tool only from where a `tool_reference` or a `tool_addition` names it."""

    def as_tool(self) -> Tool:
        function = FunctionDefinition(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


def _clients(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    name_ignored(f"tools.{tool['type']}" for tool in filter(_is_left_out, tools))
    clients = [_own(tool) for tool in tools if not _is_left_out(tool)]
    searches = any(_is_search(tool) for tool in tools)
    if searches or all(isinstance(tool, dict) and tool.get("defer_loading") for tool in clients):
        # Nobody would find them.
        clients = [
            tool | {"defer_loading": False} if isinstance(tool, dict) else tool for tool in clients
        ]
    return clients


def _is_search(tool: object) -> bool:
    """Whether it is a search that Anthropic's servers run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith("tool_search_tool_")


def _is_left_out(tool: object) -> bool:
    return tool is not None and _own(tool) is None


def _own(tool: object) -> object | None:
    """The tool with a schema; None if it is not the client's."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(kind, str) or kind == "custom":
        return tool
    if "input_schema" in tool:
        return {**tool, "type": "custom"}
    dated = _DATED.fullmatch(kind)
    known = _KNOWN.get(dated[1]) if dated else None
    if known is None:
        return None
    description, schema = known
    kept = {key: tool[key] for key in ("name", "cache_control", "defer_loading") if key in tool}
    return {**kept, "description": description, "input_schema": schema}


AnthropicTools = Annotated[list[AnthropicTool], BeforeValidator(_clients)]


class ChangedTool(RequestModel):
    """The tool of a block that adds or removes one."""

    type: Literal["tool_reference", "tool_definition"]
    name: str = ""
    """The name of a tool of the request, or of one that an earlier message defines."""
    definition: AnthropicTools = Field(default=[])
    """A tool as `tools` has it."""

    @model_validator(mode="before")
    @classmethod
    def _of_no_server(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith("mcp_"):
            raise _reference_error(f"{kind}: no MCP server is defined.")
        if isinstance(tool, dict) and isinstance(tool.get("definition"), dict):
            defined = {**tool["definition"]}
            defined.pop("defer_loading", None)
            return {**tool, "definition": [defined]}
        return tool


class ToolChangeBlock(Block):
    """A tool that is there from here on, or no longer."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool

    def tell(self, later: LaterTools) -> str:
        """The text that says so. Raises FieldRefusedError for a tool that is not defined."""
        if self.tool.type == "tool_definition":
            tools = [tool.as_tool() for tool in self.tool.definition]
        elif self.tool.name in later.left_out:
            return ""
        elif (found := later.find(self.tool.name)) is not None:
            tools = [found]
        else:
            raise _reference_error(f"The tool {self.tool.name!r} is not defined here.")
        if self.type == "tool_removal":
            return later.remove([tool.function.name for tool in tools])
        return later.add(tools) if tools else ""


def _reference_error(message: str) -> FieldRefusedError:
    return FieldRefusedError(message, "messages", {"error_code": "tool_reference_unresolved"})


def names_left_out(request: Any) -> Set[str]:
    """The names of the tools of a request that are left out."""
    tools = request.get("tools") if isinstance(request, dict) else None
    left_out = filter(_is_left_out, tools if isinstance(tools, list) else [])
    return {name for tool in left_out if isinstance(name := tool.get("name"), str)}


Content = list[
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[PictureBlock, Tag("image")]
        | Annotated[ToolUseBlock, Tag("tool_use")]
        | Annotated[ToolResultBlock, Tag("tool_result")]
        | Annotated[ThinkingBlock, Tag("thinking")]
        | Annotated[ReferenceBlock, Tag("tool_reference")]
        | Annotated[SearchResultBlock, Tag("tool_search_tool_result")]
        | Annotated[ToolChangeBlock, Tag("tool_change")]
        | Annotated[Foreign, Tag("foreign")],
        Discriminator(_kind),
        AnyMember,
    ]
]


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class MessageOutputConfig(RequestModel):
    """`output_config` of a system message."""

    effort: Effort | None = None
    """The effort from here on, in the place of the request's."""


class Message(RequestModel):
    """A message."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    role: str
    content: Annotated[
        Content, BeforeValidator(_blocks, json_schema_input_type=str | Content | None)
    ] = Field(default=[])
    clear_at: Literal["next_user_message", "never"] | None = None
    """How long the model sees a system message's text."""
    output_config: MessageOutputConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        of_assistant, of_user = (ToolUseBlock, ThinkingBlock), (ToolResultBlock,)
        foreign: tuple[type, ...] = (*of_assistant, *of_user)
        if self.role != "system":
            others = of_user if self.role == "assistant" else (ToolUseBlock,)
            foreign = (*others, ToolChangeBlock)
        for block in self.content:
            if isinstance(block, foreign):
                message = (
                    f"No block of the type {block.type!r} can be in a turn of the {self.role}."
                )
                raise InvalidRequestError(message, "messages")
        return self

    def as_turns(self, later: LaterTools, *, reasoning: bool, is_cleared: bool) -> list[Turn]:
        """The message as turns, of which tools' results are some; `reasoning` keeps the assistant's. Of a
        message that is cleared, only the tools are left that it adds or removes."""
        results = [b.as_turn(later) for b in self.content if isinstance(b, ToolResultBlock)]
        calls = [block.as_call() for block in self.content if isinstance(block, ToolUseBlock)]
        kept = [b for b in self.content if not is_cleared or isinstance(b, ToolChangeBlock)]
        parts = _canonical_parts(kept, later)
        if (results or is_cleared or self.output_config is not None) and not parts:
            return results
        thinking = "".join(b.thinking for b in self.content if isinstance(b, ThinkingBlock))
        keeps = reasoning and self.role == "assistant"
        turn = Turn.of(self.role, parts, reasoning=thinking if keeps else "", calls=tuple(calls))
        return [*results, turn]
