"""The bodies of Anthropic's requests, translated to OpenAI's chat, and how workers prepare them.

Source: Anthropic's API reference, "Messages" and "Count tokens in a Message".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from serve_app.apis.anthropic.messages import (
    AnthropicTools,
    Effort,
    Message,
    Texts,
    ToolResultBlock,
    names_left_out,
)
from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import Api
from serve_app.config.sampling_fields import read_params, takes_sampling
from serve_app.prompt.conversation import Turn
from serve_app.server.answering import preparation
from serve_app.server.answering.preparation import Chat, PromptLength
from serve_app.server.answering.requests import (
    MOST_TOKENS,
    AnswerParams,
    NamedToolChoice,
    TranslatedChat,
)
from serve_app.server.answering.tools import LaterTools
from serve_app.server.http.request_model import ModelledRequest, RequestModel
from serve_app.server.model_registry import Models, find


class ToolChoice(RequestModel):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The name of the tool that must be called, with the type `tool`."""
    disable_parallel_tool_use: bool = False
    """Allows one call in a turn."""

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.type == "tool") is (self.name is None):
            message = "'name' goes with the type \"tool\", and with no other."
            raise InvalidRequestError(message, "tool_choice")
        return self

    def as_choice(self) -> Literal["auto", "none", "required"] | NamedToolChoice:
        if self.name is not None:
            return NamedToolChoice.of(self.name)
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class Thinking(RequestModel):
    """`thinking`."""

    INERT: ClassVar[frozenset[str]] = frozenset({"block_binding"})

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """`adaptive` is for any model: whether it thinks is its own business. With `between_tools`, only the
    answer to a tool's result begins with reasoning."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of reasoning, less than `max_tokens`."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """`omitted` leaves the reasoning out of the answer; otherwise it is given as it is."""

    @model_validator(mode="after")
    def _check(self) -> Thinking:
        if (self.type == "enabled") is (self.budget_tokens is None):
            message = "'budget_tokens' goes with the type \"enabled\", and with no other."
            raise InvalidRequestError(message, "thinking")
        return self


class OutputFormat(RequestModel):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema of the answer's text. An empty one is any object's."""


class OutputConfig(RequestModel):
    """`output_config`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": (None,)}

    effort: Effort | None = None
    """How much a model that can thinks, with `thinking`; told to the chat template."""
    format: OutputFormat | None = None


class Metadata(RequestModel):
    """`metadata`."""

    user_id: str | None = None
    """The user whose request this is. Slots are shared fairly among users."""


class CountTokensRequest(ModelledRequest):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
        "thread": (None,),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset({"mcp_servers", "thread"})
    FALLBACKS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    }
    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            *("cache_control", "betas", "anthropic_beta", "anthropic_version"),
            *("billing_policy", "user_profile_id", "workspace_id"),
            "compaction",  # counts the messages as they are
        }
    )
    _left_out: Set[str] = PrivateAttr(frozenset())

    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts = Field(default=[])
    tools: AnthropicTools = Field(default=[])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Whether the model thinks before it answers, if its chat template has reasoning; without this, it is
    asked not to."""
    output_config: OutputConfig = Field(default=OutputConfig())
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_names_left_out(cls, request: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(request)
        made._left_out = names_left_out(request)
        return made

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        if self.thinks and forced:
            raise InvalidRequestError(
                "'thinking' is not supported together with a forced tool call.", "thinking"
            )
        return self

    @property
    def thinks(self) -> bool:
        kind = "disabled" if self.thinking is None else self.thinking.type
        if kind != "between_tools":
            return kind != "disabled"
        last = self.messages[-1].content if self.messages else []
        return any(isinstance(block, ToolResultBlock) for block in last)

    def as_chat(self) -> TranslatedChat:
        """Translate the request to OpenAI's chat. Raises InvalidRequestError."""
        texts = tuple(block.text for block in self.system if block.text)
        system = [Turn("system", texts)] if texts else []
        choice = self.tool_choice
        answer = self.output_config.format or self.output_format
        tools = [tool.as_tool() for tool in self.tools]
        later = LaterTools(tools, self._left_out)
        turns = self._turns(later)
        return TranslatedChat(
            turns=[*system, *turns],
            tools=[
                tool
                for tool, declared in zip(tools, self.tools, strict=True)
                if not declared.defer_loading
            ],
            later_tools=[*later.known.values()],
            removed_tools=frozenset(later.removed),
            tool_choice=choice.as_choice() if choice else None,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            json_schema=None if answer is None else answer.schema_ or {"type": "object"},
            reasoning_effort=self._effort() if self.thinks else None,
            chat_template_kwargs={"enable_thinking": self.thinks},
            **self._sampling(),
        )

    def _turns(self, later: LaterTools) -> list[Turn]:
        keeps = self.thinking is None or self.thinks
        of_user = [i for i, message in enumerate(self.messages) if message.role == "user"]
        last = max(of_user, default=-1)
        return [
            turn
            for place, message in enumerate(self.messages)
            for turn in message.as_turns(
                later,
                reasoning=keeps,
                is_cleared=message.clear_at == "next_user_message" and place < last,
            )
        ]

    def _effort(self) -> Effort | None:
        """The effort that the last message with one sets, or the request's."""
        configs = [self.output_config, *(message.output_config for message in self.messages)]
        efforts = [config.effort for config in configs if config and config.effort]
        return efforts[-1] if efforts else None

    def _sampling(self) -> dict[str, Any]:
        return {}


@takes_sampling(Api.ANTHROPIC)
class MessagesRequest(CountTokensRequest, AnswerParams):
    """POST /v1/messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.NEUTRAL,
        "compaction": (None,),
        "container": (None,),
        "inference_geo": (None,),
        "diagnostics": (None,),
    }
    REFUSED: ClassVar[frozenset[str]] = CountTokensRequest.REFUSED | {"compaction", "container"}
    INERT: ClassVar[frozenset[str]] = CountTokensRequest.INERT - {"compaction"} | {
        *("fallbacks", "fallback_credit_token")  # no model here declines
    }

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            message = "'budget_tokens' must be less than 'max_tokens'."
            raise InvalidRequestError(message, "thinking")
        return self

    def _sampling(self) -> dict[str, Any]:
        return {
            **self.common_fields(),
            **read_params(self, Api.ANTHROPIC),
            "max_tokens": self.max_tokens,
            "thinking_budget_tokens": self.thinking.budget_tokens if self.thinking else None,
            "user": self.metadata.user_id if self.metadata else None,
        }


class AnthropicErrorBody(BaseModel):
    """The error, in Anthropic's words."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """The `error_code` by which SDKs do without what is refused, and more."""


class AnthropicErrorResponse(BaseModel):
    """Every answer that is not a success."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


@dataclass(frozen=True, slots=True)
class Messages:
    """The prepared request for a message."""

    chat: Chat
    shows_reasoning: bool


def messages(models: Models, request: MessagesRequest) -> Messages:
    """POST /v1/messages. Raises CorralError."""
    chat = request.as_chat()
    model = find(models, request.model)
    shown = (
        request.thinking is not None and request.thinks and request.thinking.display != "omitted"
    )
    return Messages(preparation.prepare_chat(model, chat, 1, "messages"), shown)


def count_tokens(models: Models, request: CountTokensRequest) -> PromptLength:
    """POST /v1/messages/count_tokens. Raises CorralError."""
    chat = request.as_chat()
    model = find(models, request.model)
    return preparation.length(model, chat, "messages")
