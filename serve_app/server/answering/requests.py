"""Requests for completions and chats, in OpenAI's form, which all protocols are translated to.

Source: OpenAI's API reference, "Completions" and "Chat"; sampling parameters are declared in
`serve_app.base.sampling`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, field_validator, model_validator

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import Api, SamplingParams, StopString, StopStrings, samplers_by
from serve_app.config.defaults import ModelDefaults
from serve_app.config.sampling_fields import read_params, takes_sampling
from serve_app.prompt import grammars
from serve_app.prompt.conversation import Conversation, Turn
from serve_app.prompt.grammars import Dialect
from serve_app.server.answering.tools import Tool
from serve_app.server.http import request_model
from serve_app.server.http.request_model import (
    ModelledRequest,
    RequestModel,
    describe_extra_fields,
    name_ignored,
)

Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_CHOICES = 32
"""Answers that one request may ask for, over all of its prompts."""
MAX_LOGPROBS = 20
_NO_SEED = -1  # llama-server's clients send that

PingInterval = Annotated[int, Field(ge=-1, le=3600)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model that can thinks before it answers."""
NO_EFFORT = frozenset({"none", "minimal"})
_EFFORTS_OF_TEMPLATES = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Templates that know efforts know `low`, `medium` and `high`."""
Verbosity = Literal["low", "medium", "high"]

Text = Annotated[str, Field(min_length=1)]
RequestMetadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""OpenAI's bounds of what a request has given back with its answer."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)] | Literal[False]
MOST_TOKENS = 2**31 - 1
"""The bound of what a request may ask for: no context has so many."""
MaxTokens = Annotated[int, Field(ge=-1, le=MOST_TOKENS)]
"""Most tokens to generate; -1 for all that the context has room for, 0 to only compute the prompt."""


class ObfuscationOptions(RequestModel):
    """`stream_options` of responses."""

    include_obfuscation: bool = False
    """Whether pieces of text come with noise, so that their sizes do not show what they are."""


class PromptCacheOptions(RequestModel):
    """`prompt_cache_options`. Prompts are cached anyway."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prewarm": (None, False)}
    REFUSED: ClassVar[frozenset[str]] = frozenset(NEUTRAL)
    INERT: ClassVar[frozenset[str]] = frozenset({"comparison_response_id", "mode", "ttl"})


class StreamOptions(ObfuscationOptions):
    """`stream_options`."""

    include_usage: bool = False
    """Send one more chunk, with the usage and no choices, before the end."""


def _is_token(key: object) -> bool:
    return isinstance(key, str) and key.isdecimal()


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """`token_bias` is a second form of `logit_bias`, and not a name of its own."""
    describe_extra_fields(schema, model)
    pairs = schema["properties"].pop("token_bias")
    schema["properties"]["logit_bias"]["anyOf"] += pairs["anyOf"]


class TextForm(NamedTuple):
    """A form that the text must have."""

    param: str
    kind: Literal["grammar", "schema", "regex"]
    form: Any
    """A GBNF grammar, a JSON schema, or a regular expression."""

    def grammar(self, dialect: Dialect | None = None) -> str:
        """The form for the engine; a schema's text may come after reasoning. Raises InvalidRequestError."""
        if self.kind == "schema":
            return grammars.from_json_schema(self.form, self.param, dialect, name_ignored)
        translate = grammars.from_gbnf if self.kind == "grammar" else grammars.from_regex
        return translate(self.form, self.param)


class StructuredOutputs(RequestModel):
    """`structured_outputs`, as vLLM has it."""

    INERT: ClassVar[frozenset[str]] = frozenset({"disable_fallback"})

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: list[str] | None = None
    """The texts of which one is the answer."""
    grammar: str | None = None
    """A GBNF grammar."""

    def constraints(self, prefix: str) -> Iterator[TextForm]:
        if self.json_ is not None:
            yield TextForm(f"{prefix}json", "schema", _schema(self.json_, f"{prefix}json"))
        if self.json_object:
            yield TextForm(f"{prefix}json_object", "schema", {"type": "object"})
        if self.regex is not None:
            yield TextForm(f"{prefix}regex", "regex", self.regex)
        if self.choice is not None:
            if not self.choice:
                raise InvalidRequestError(f"{prefix}choice: no text is listed.", f"{prefix}choice")
            choices = "|".join(map(re.escape, self.choice))
            yield TextForm(f"{prefix}choice", "regex", f"(?:{choices})")
        if self.grammar is not None:
            yield TextForm(f"{prefix}grammar", "grammar", self.grammar)


def _schema(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        schema = request_model.loads(value)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: not JSON: {error}", param) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: no JSON schema, which is an object.", param)
    return schema


class LoraScale(RequestModel):
    """How much of one LoRA adapter a request has."""

    id: int
    """The adapter's place in GET /lora-adapters."""
    scale: Annotated[Finite, Field(ge=-100, le=100)] = 0.0


class AnswerParams(ModelledRequest):
    """The fields that requests for an answer have in several protocols."""

    stream: bool = False
    service_tier: str | None = None
    """`flex` runs the request behind all others, like lines of batches, unless it can only meet its
    deadline beside them. Other tiers change nothing."""
    cache_salt: CacheSalt | None = None
    """vLLM's: cached prefixes are shared only with requests that send the same."""
    sse_ping_interval: PingInterval | None = None
    """llama-server's: seconds without news after which a stream sends a ping; 0 and -1: never. A ping is
    an event that changes nothing. Without it, `ingress.sse_ping_interval_s` counts."""

    def common_fields(self) -> dict[str, Any]:
        """Returns these fields, for the request in OpenAI's form."""
        return {name: getattr(self, name) for name in AnswerParams.model_fields if name != "model"}


@takes_sampling(Api.OPENAI)
class GenerationParams(AnswerParams):
    """The common fields of completions and chat completions."""

    model_config = ConfigDict(json_schema_extra=_describe)

    # SGLang's and vLLM's routers add these to each request.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "no_stop_trim": (None, False),
        "skip_special_tokens": (None, True),
        "separate_reasoning": (None, True),
        "stream_reasoning": (None, True),
        "include_reasoning": (None, True),
        "return_hidden_states": (None, False),
        "truncate_prompt_tokens": (None, -1),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset({"truncate_prompt_tokens"})
    INERT: ClassVar[frozenset[str]] = frozenset(
        {"store", "prediction", "prompt_cache_key", "guided_decoding_backend"}
    )

    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None
    """llama-server's name of `max_tokens`; counts before it."""
    logit_bias: dict[TokenId, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    """Token id to what is added to its logit; -100 bans the token."""
    token_bias: list[tuple[TokenId | Text, Bias]] | None = Field(default=None, exclude=True)
    """`logit_bias` in llama-server's form: pairs of a token, or of a text's tokens, and a value; false bans
    it."""
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    """llama-server's: how many most likely tokens to tell with every token's log probability; 0 for
    neither."""
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    """vLLM's name of `repeat_penalty`, which counts before it."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to every prompt; with a `seed`, each next one has the next seed."""
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """llama-server's name of `n`; counts before it."""
    lora: Annotated[list[LoraScale], Field(max_length=64)] | None = None
    """llama-server's: the LoRA adapters of this request, whatever its `model` names; the others have a
    scale of 0."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """llama-server's: a GBNF grammar that the text must match."""
    json_schema: dict[str, Any] | None = None
    """llama-server's: a JSON schema that the text must validate against."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole text must match."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's: a form that the whole text must have."""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: str | None = None
    """vLLM's older name of `structured_outputs.regex`."""
    guided_choice: list[str] | None = None
    """vLLM's older name of `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """vLLM's older name of `structured_outputs.grammar`."""
    samplers: (
        Annotated[str, Field(max_length=64)] | Annotated[list[str], Field(max_length=64)] | None
    ) = None
    """llama-server's: the samplers that are used, in their order, by their names or as a string of their
    letters. Each counts once. Penalties and DRY come first all the same."""
    timings: bool = False
    """Whether to tell, at the end, what the request waited for and how long; only with one answer."""
    timings_per_token: bool = False
    """llama-server's: the same, and what is known so far with each part of a stream."""
    return_progress: bool = False
    """llama-server's: whether a stream tells how far its prompt is computed, in `prompt_progress`."""
    post_sampling_probs: bool = False
    """llama-server's: whether `logprobs` and `n_probs` tell the probabilities that tokens are drawn with,
    after all samplers, as `prob` and `top_probs`."""
    user: str | None = None
    """The user whose request this is. Slots are shared fairly among users."""
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`, which counts before it."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """vLLM's: lower ones get a slot first."""
    context_shift: bool | None = None
    """Whether to go on when the context is full, with its oldest tokens dropped, up to `max_tokens`."""
    n_keep: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """llama-server's: first tokens that a context shift keeps; -1 keeps all of the prompt."""
    n_discard: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """llama-server's: tokens that a context shift drops; 0: half of what it may."""
    n_cache_reuse: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """llama-server's: chunks of so many tokens or more are also taken from the cache behind tokens that the
    prompt has no more. They are shifted. 0: only the longest prefix."""
    id_slot: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    """llama-server's: the slot to use, if it is idle, of the replica that gets the request."""
    cache_prompt: bool = True
    """llama-server's: false computes the whole prompt anew, and leaves nothing for others to start from."""
    metadata: dict[str, Any] | None = None
    """Accepted and not used."""

    @model_validator(mode="before")
    @classmethod
    def _bias_in_pairs(cls, data: Any) -> Any:
        if isinstance(data, dict) and "token_bias" in data:
            raise InvalidRequestError("Unknown parameter: 'token_bias'.", "token_bias")
        bias = data.get("logit_bias") if isinstance(data, dict) else None
        if isinstance(bias, dict) and not all(_is_token(key) for key in bias):
            bias = [[int(key) if _is_token(key) else key, value] for key, value in bias.items()]
        if isinstance(bias, list):
            data = {**data, "token_bias": bias}
            del data["logit_bias"]
        return data

    @field_validator(
        "stop",
        mode="before",
        check_fields=False,
        json_schema_input_type=StopString | StopStrings | None,
    )
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_timings(self) -> GenerationParams:
        if self.timings and self.n_answers > 1:
            raise InvalidRequestError("'timings' is for one answer only.", "timings")
        return self

    @property
    def n_logprobs(self) -> int | None:
        """How many most likely tokens are told with each token's log probability; None: not even that."""
        return self.n_probs or None

    @property
    def n_answers(self) -> int:
        return self.n_cmpl or self.n or 1

    def constraints(self) -> Iterator[TextForm]:
        if self.grammar is not None:
            yield TextForm("grammar", "grammar", self.grammar)
        if self.json_schema is not None:
            yield TextForm("json_schema", "schema", self.json_schema)
        if self.regex is not None:
            yield TextForm("regex", "regex", self.regex)
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints("structured_outputs.")
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        yield from guided.constraints("guided_")

    @property
    def constraint(self) -> TextForm | None:
        """The one that there may be. Raises InvalidRequestError if there are several."""
        constraints = list(self.constraints())
        if len(constraints) > 1:
            names = ", ".join(constraint.param for constraint in constraints)
            raise InvalidRequestError(f"Only one of {names} can be given.", constraints[1].param)
        return constraints[0] if constraints else None

    def answer_grammar(self) -> str | None:
        """The grammar that the text must match, for the engine. Raises InvalidRequestError."""
        return None if self.constraint is None else self.constraint.grammar()

    @property
    def most_tokens(self) -> int | None:
        """How many tokens the request wants at most, as MaxTokens; None if it does not say."""
        return self.max_tokens if self.n_predict is None else self.n_predict

    def biases(self, tokenize: Callable[[str], Iterable[int]]) -> dict[int, float]:
        """The numbers that are added to logits. Of a token that is named twice, the last counts."""
        biases = {
            token: float("-inf") if bias == -100 else bias
            for token, bias in (self.logit_bias or {}).items()
        }
        for which, value in self.token_bias or ():
            tokens = [which] if isinstance(which, int) else tokenize(which)
            biases |= dict.fromkeys(tokens, float("-inf") if value is False else float(value))
        return biases

    def sampling(self, defaults: ModelDefaults) -> SamplingParams:
        """The engine's parameters but for `logit_bias`; what the request leaves open has the model's
        defaults, or Corral's. Raises InvalidRequestError."""
        most = self.most_tokens
        most = defaults.max_tokens if most is None else most
        penalty = self.repetition_penalty
        renamed = {} if penalty is None else {"repeat_penalty": penalty}
        values = {**defaults.sampling, **renamed, **read_params(self, Api.OPENAI)}
        values["stop"] = tuple(filter(None, values.get("stop", ())))
        if values.get("seed") == _NO_SEED:
            del values["seed"]
        return SamplingParams(
            **values,
            samplers=None if self.samplers is None else samplers_by(self.samplers),
            max_tokens=None if most is None or most < 0 else most,
            grammar=self.answer_grammar(),
            logprobs=self.n_logprobs,
            post_sampling_probs=self.post_sampling_probs and self.n_logprobs is not None,
        )


class NamedFunction(RequestModel):
    """`tool_choice.function`."""

    name: str


class NamedToolChoice(RequestModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction

    @classmethod
    def of(cls, name: str) -> NamedToolChoice:
        return cls(type="function", function=NamedFunction(name=name))


class AllowedToolChoice(RequestModel):
    """`tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    names: list[str]


_ANY_OBJECT = {"type": "object"}


ToolChoice = Literal["auto", "none", "required"] | NamedToolChoice | AllowedToolChoice | None
"""`tool_choice`, in the form that all protocols are translated to."""


class NamedSchema(RequestModel):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    """A JSON schema; without one, any JSON object will do."""
    strict: bool | None = None
    """Answers are always held to the schema."""


class ResponseFormat(RequestModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """llama-server's: a JSON schema, without a name."""

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise InvalidRequestError(
                "The type \"json_schema\" needs 'json_schema'.", "response_format"
            )
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema that answers must validate against, if there is one."""
        if self.type == "text":
            return None
        if self.json_schema is not None and self.type == "json_schema":
            return self.json_schema.schema_ or _ANY_OBJECT
        return self.schema_ or _ANY_OBJECT


class ChatRequest(GenerationParams):
    """A chat of any protocol: all fields but its messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationParams.NEUTRAL,
        "functions": (None, []),
        "function_call": (None, "auto", "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
    }
    REFUSED: ClassVar[frozenset[str]] = (
        frozenset(NEUTRAL) - frozenset(GenerationParams.NEUTRAL) | GenerationParams.REFUSED
    )
    INERT: ClassVar[frozenset[str]] = GenerationParams.INERT | {"prompt_cache_retention"}

    logprobs: bool | None = None
    """Whether to tell every token's log probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of most likely tokens whose log probabilities are told as well."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, any JSON object, or JSON that a schema validates."""
    max_completion_tokens: MaxTokens | None = None
    """The newer name of max_tokens; counts before it."""
    tools: list[Tool] = Field(default=[])
    """Functions, and custom tools, that the model may call."""
    tool_choice: ToolChoice = None
    """`none` hides the tools from the model; `required`, or a function's name, makes it call some, or that
    one, with arguments that its schema validates; `allowed_tools` hides all others."""
    parallel_tool_calls: bool | None = None
    """False allows one call in a turn."""
    parse_tool_calls: bool = True
    """llama-server's: false leaves calls in the content, as the model writes them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """llama-server's and vLLM's: more variables for the chat template, as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """llama-server's: false leaves out what begins the assistant's turn."""
    continue_final_message: bool | None = None
    """vLLM's: whether the last message, if it is the assistant's, is the beginning of the answer. It is by
    default, as at llama-server."""
    verbose: bool = False
    """llama-server's: whether to tell the prompt as the model got it, in `__verbose`."""
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """llama-server's: so many tokens of reasoning, and it must answer; -1: as `defaults.reasoning_budget`
    says."""
    thinking_budget_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """The other name of `reasoning_budget_tokens`."""
    reasoning_budget_message: Annotated[str, Field(max_length=1024)] | None = None
    """llama-server's: the last words of reasoning whose budget is used up."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """llama-server's: `none` leaves reasoning and its tags in the content."""
    reasoning_effort: Effort | None = None
    """How much a model that can thinks before it answers, told to the chat template as
    `reasoning_effort`, `enable_thinking` and `thinking`; `none` and `minimal`: not at all."""
    verbosity: Verbosity | None = None
    """Told to the chat template, which may know what to do with it."""
    prompt_cache_options: PromptCacheOptions | None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _format_by_its_type(cls, value: object) -> object:
        return {"type": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        self.forced_tools()
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "'add_generation_prompt' and 'continue_final_message' cannot be combined.",
                "continue_final_message",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        return self

    @property
    def n_logprobs(self) -> int | None:
        """The number of most likely tokens to tell with each token; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else super().n_logprobs

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of the answer: `n_predict` counts first, then `max_completion_tokens`."""
        newer = self.max_completion_tokens
        return super().most_tokens if newer is None or self.n_predict is not None else newer

    @property
    def reasoning_budget(self) -> int | None:
        newer = self.reasoning_budget_tokens
        return self.thinking_budget_tokens if newer is None else newer

    @property
    def conversation(self) -> Conversation:
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """Whether a last message of the assistant's begins the answer."""
        return self.continue_final_message is not False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """More variables for the chat template; those that the request gives by their names count first."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort = self.reasoning_effort
            variables["enable_thinking"] = variables["thinking"] = effort not in NO_EFFORT
            variables["reasoning_effort"] = _EFFORTS_OF_TEMPLATES.get(effort, effort)
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        return variables | (self.chat_template_kwargs or {})

    @property
    def may_think(self) -> bool:
        """Whether reasoning may come first."""
        constraint = self.constraint
        return not self.forced_tools() and (constraint is None or constraint.kind == "schema")

    @property
    def holds_calls(self) -> bool:
        """Whether calls must be as the request says, if there are any."""
        if not self.offered_tools:
            return False
        strict = any(tool.function.strict for tool in self.offered_tools)
        strict = strict or self.constraint is not None
        return strict or self.parallel_tool_calls is False or bool(self.forced_tools())

    def constraints(self) -> Iterator[TextForm]:
        yield from super().constraints()
        schema = self.response_format.schema_of_answer() if self.response_format else None
        if schema is not None:
            yield TextForm("response_format", "schema", schema)

    def answer_grammar(self) -> str | None:
        """The grammar of the whole answer; None for a schema, whose grammar depends on the prompt."""
        constraint = self.constraint
        if constraint is None or constraint.kind == "schema":
            return None
        if self.offered_tools:
            raise InvalidRequestError(
                f"{constraint.param!r} is not supported together with 'tools'. Use a JSON schema.",
                constraint.param,
            )
        return constraint.grammar()

    @property
    def known_tools(self) -> list[Tool]:
        """The tools that the model knows where its answer begins."""
        return self.tools

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return self._allow(self.known_tools)

    def _allow(self, tools: list[Tool]) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, AllowedToolChoice):
            return [tool for tool in tools if tool.function.name in self.tool_choice.names]
        return tools

    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called; empty if none must. Raises InvalidRequestError."""
        choice = self.tool_choice
        mode = choice.mode if isinstance(choice, AllowedToolChoice) else choice
        if mode is None or mode in ("auto", "none"):
            return []
        offered = self.offered_tools
        if isinstance(choice, NamedToolChoice):
            offered = [tool for tool in offered if tool.function.name == choice.function.name]
            if not offered:
                message = (
                    f"'tools' has no function {choice.function.name!r} that can be called now."
                )
                raise InvalidRequestError(message, "tool_choice")
        if not offered:
            raise InvalidRequestError("'tool_choice' needs 'tools'.", "tool_choice")
        return offered

    def tools_for_template(self) -> list[dict[str, Any]]:
        """The tools at the prompt's front. Without any, the first that a turn makes known is there, too:
        templates say there how calls are written."""
        front = self._allow(self.tools) or self.offered_tools[:1]
        return [tool.for_template() for tool in front]


class TranslatedChat(ChatRequest):
    """A chat that came by another protocol than OpenAI's."""

    turns: list[Turn]
    later_tools: list[Tool] = Field(default=[])
    """The tools that turns make known."""
    removed_tools: frozenset[str] = frozenset()
    """The names of the tools that turns take back."""

    @property
    def conversation(self) -> Conversation:
        return self.turns

    @property
    def known_tools(self) -> list[Tool]:
        if not self.later_tools and not self.removed_tools:
            return self.tools
        known = {tool.function.name: tool for tool in (*self.tools, *self.later_tools)}
        return [tool for name, tool in known.items() if name not in self.removed_tools]
