"""Makes prompts and parameters for the engine from a request of any protocol. Runs in workers."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from serve_app.base.errors import InvalidRequestError, MediaError, PromptTooLongError
from serve_app.base.sampling import LogitBias, ReasoningBudget, SamplingParams
from serve_app.base.values.adapters import Adapters
from serve_app.base.values.media import MEDIUM, Medium, Size
from serve_app.base.values.requests import GenerationRequest
from serve_app.prompt import grammars
from serve_app.prompt.conversation import Conversation, Turn
from serve_app.prompt.normaliser import PARAGRAPH
from serve_app.prompt.tool_calls.calls import FunctionNames
from serve_app.prompt.tool_calls.format import ThinkingPhase
from serve_app.server.answering.requests import ChatRequest, GenerationParams
from serve_app.server.http.request_model import name_ignored
from serve_app.server.model_registry import ModelInfo, active
from serve_app.server.workers.worker import more_memory

if TYPE_CHECKING:
    from serve_app.server.media.decoder import MediaDecoder

MAX_TEXT_CHARS = 3 * 2**18
"""Characters of one prompt or text."""
CHAR_BYTES = 64
"""The bytes of memory that a character takes while it is tokenized: some forty in llama.cpp."""


def tokenize_checked(
    model: ModelInfo, field: str, n_chars: int, encode: Callable[..., tuple[int, ...]], *args: Any
) -> tuple[int, ...]:
    """The tokens that `encode` makes of these arguments, which have so many characters. Raises
    PromptTooLongError for more than can fit, before they are tokenized."""
    refuse_far_too_long(model, field, n_chars)
    with more_memory(CHAR_BYTES * n_chars):
        return encode(*args)


def refuse_far_too_long(model: ModelInfo, field: str, n_chars: int) -> None:
    """Raises PromptTooLongError for so many characters if they cannot fit, however they are tokenized, and
    InvalidRequestError for more than MAX_TEXT_CHARS."""
    n_least = model.tokenizer.least_tokens(n_chars)
    if n_least >= model.n_ctx_slot:
        raise PromptTooLongError(n_least, model.n_ctx_slot, field, exact=False)
    refuse_huge(field, n_chars)


def refuse_huge(field: str, n_chars: int) -> None:
    if n_chars > MAX_TEXT_CHARS:
        message = f"{field}: {n_chars} characters; at most {MAX_TEXT_CHARS} are tokenized at once."
        raise InvalidRequestError(message, field)


def check_medium(model: ModelInfo | MediaDecoder, is_sound: bool, field: str) -> None:
    """Raises MediaError for a kind of medium that the model has no projector for."""
    if is_sound and not model.hears:
        message = "Audio input is not supported: this model has no projector for sound."
        raise MediaError(message, field)
    if not is_sound and not model.sees:
        why = (
            "hears, and does not see" if model.hears else "reads text only, as it has no projector"
        )
        raise MediaError(f"Image input is not supported: this model {why}.", field)


def with_media(
    model: ModelInfo, prompt: tuple[int, ...], urls: Sequence[str], field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    """The prompt with MEDIUM in the place of each picture or sound, and the media in its order. In
    `prompt`, -1 is the first one, -2 the second, and so on. Raises InvalidRequestError, and MediaError like
    `check_medium`."""
    if not urls or model.media is None:
        return prompt, ()
    numbers = [-1 - token for token in prompt if token < 0]
    if sorted(numbers) != list(range(len(urls))):
        raise InvalidRequestError("The model's chat template does not keep pictures.", field)
    media = model.media.decode(urls, field)
    tokens = tuple(MEDIUM if token < 0 else token for token in prompt)
    return tokens, tuple(media[number] for number in numbers)


def refuse_unknown_tokens(model: ModelInfo, field: str, tokens: Iterable[int]) -> None:
    """Raises InvalidRequestError for token ids that the model does not have."""
    n_vocab = model.tokenizer.model.n_vocab
    if any(token not in range(n_vocab) for token in tokens):
        message = f"{field}: token ids of this model are below {n_vocab}."
        raise InvalidRequestError(message, field)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """A prepared body: the prompts, the engine's request for each, and how they are answered."""

    model: str
    request: GenerationRequest
    """The engine's request for each answer. The ingress adds the prompt, and what it knows of the caller. A
    long prompt or logit bias is there once, however many answers there are."""
    prompts: tuple[tuple[int, ...], ...]
    n: int
    """The answers to each prompt."""
    stream: bool
    include_usage: bool
    obfuscates: bool
    timings: bool
    timings_per_token: bool
    return_progress: bool
    user: str | None
    cache_salt: str | None
    sse_ping_interval: int | None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.prompts[0]

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n

    def sampling_of(self, number: int) -> SamplingParams:
        """The parameters of the answer with this number. Answers to one prompt differ."""
        seed, number = self.sampling.seed, number % self.n
        if seed is None or number == 0:
            return self.sampling
        return dataclasses.replace(self.sampling, seed=seed + number)


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A chat, as a prompt, and what its answers are split by."""

    generation: Generation
    tools: Sequence[Mapping[str, Any]]
    """The tools as chat templates read them; empty if calls are not looked for."""
    thinks: bool
    custom_tools: frozenset[str] = frozenset()
    """The names of the tools that take a text, and no arguments."""
    prefill: str = ""
    """The beginning of the answer, from the request's last message, the assistant's."""
    verbose: bool = False
    """Whether the answer tells the prompt."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.generation.prompt


def make_generation(
    model: ModelInfo,
    params: GenerationParams,
    prompts: Sequence[tuple[int, ...]],
    n: int,
    sampling: SamplingParams,
    prompt_field: str,
    media: tuple[Medium, ...] = (),
) -> Generation:
    """`n` answers to each prompt. Raises InvalidRequestError for what this model cannot do."""
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", prompt_field)
        if len(prompt) >= model.n_ctx_slot:
            raise PromptTooLongError(len(prompt), model.n_ctx_slot, prompt_field)
    if params.context_shift and sampling.max_tokens is None:
        raise InvalidRequestError(
            "'context_shift' needs 'max_tokens': the text might never end.", "context_shift"
        )
    refuse_unknown_tokens(model, "logit_bias", sampling.logit_bias.tokens.tolist())
    options = params.stream_options
    return_progress = params.return_progress and params.stream
    timings_per_token = params.timings_per_token and params.stream
    request = GenerationRequest(
        "",
        (),
        sampling,
        priority=params.priority,
        context_shift=params.context_shift,
        n_keep=params.n_keep,
        n_discard=params.n_discard,
        n_cache_reuse=params.n_cache_reuse,
        slot_id=params.id_slot,
        return_progress=return_progress or timings_per_token,
        background=params.service_tier == "flex",
        told_together=not params.stream,
        adapters=_adapters(model, params),
        media=media,
    )
    return Generation(
        model=model.id,
        request=request,
        prompts=tuple(prompts),
        n=n,
        stream=params.stream,
        include_usage=options is not None and options.include_usage,
        obfuscates=options is not None and options.include_obfuscation,
        timings=(params.timings or params.timings_per_token) and len(prompts) * n == 1,
        timings_per_token=timings_per_token,
        return_progress=return_progress,
        user=params.user or params.safety_identifier,
        cache_salt=params.cache_salt if params.cache_prompt else uuid.uuid4().hex,
        sse_ping_interval=params.sse_ping_interval,
    )


def _adapters(model: ModelInfo, params: GenerationParams) -> Adapters:
    """The adapters that the request or its model's name asks for. Raises InvalidRequestError."""
    if params.lora is None:
        return model.used
    scales = {}
    for adapter in params.lora:
        if adapter.id not in model.adapters:
            raise InvalidRequestError(
                f"There is no LoRA adapter {adapter.id}. This model has {len(model.adapters)}.",
                "lora",
            )
        scales[adapter.id] = adapter.scale
    return active(model.adapters[i]._replace(scale=scale) for i, scale in scales.items())


class PromptLength(msgspec.Struct, frozen=True, tag=True):
    """How long a prompt is."""

    model: str
    n_tokens: int
    """The tokens of its words."""
    sizes: tuple[Size, ...]
    """The sizes of its pictures and sounds, whose tokens only an engine can count."""


def sampling(model: ModelInfo, params: GenerationParams) -> SamplingParams:
    """The engine's parameters. Raises InvalidRequestError."""
    biases = params.biases(lambda text: model.tokenizer.tokenize(text, False, False))
    defaulted = params.sampling(model.defaults)
    return dataclasses.replace(defaulted, logit_bias=LogitBias.of(biases)) if biases else defaulted


def prepare_chat(model: ModelInfo, body: ChatRequest, n: int, prompt_field: str) -> Chat:
    """`n` answers to a chat. Raises InvalidRequestError."""
    turns, begun = _turns(model, body)
    prompt, media = _with_attachments(model, body, turns, begun, prompt_field)
    sampling = chat_sampling(model, body, prompt, is_begun=begun is not None)
    if body.may_think:
        sampling = dataclasses.replace(sampling, reasoning=_reasoning(model, body, prompt))
    return Chat(
        make_generation(model, body, [prompt], n, sampling, prompt_field, media),
        [tool.for_template() for tool in body.offered_tools if body.parse_tool_calls],
        (body.reasoning_format or model.defaults.reasoning_format) != "none",
        frozenset(tool.function.name for tool in body.offered_tools if tool.type == "custom"),
        "" if begun is None else begun.text,
        body.verbose,
    )


def _reasoning(
    model: ModelInfo, body: ChatRequest, prompt: tuple[int, ...]
) -> ReasoningBudget | None:
    """The bound of the answer's reasoning, if the request or the model's defaults set one."""
    defaults, message = model.defaults, body.reasoning_budget_message
    n_tokens = body.reasoning_budget
    n_tokens = defaults.reasoning_budget if n_tokens is None or n_tokens < 0 else n_tokens
    if n_tokens < 0:
        return None
    said = defaults.reasoning_budget_message if message is None else message
    return model.tokenizer.reasoning_budget(prompt, n_tokens, said)


def chat_with_media(
    model: ModelInfo, body: ChatRequest, prompt_field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    """The prompt that asks for the chat's next turn, with MEDIUM in the places of its pictures and sounds,
    and these. Raises InvalidRequestError, and MediaError for what the model neither sees nor hears."""
    return _with_attachments(model, body, *_turns(model, body), prompt_field)


def _with_attachments(
    model: ModelInfo, body: ChatRequest, turns: Conversation, begun: Turn | None, prompt_field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    attachments = [medium for turn in turns for medium in turn.attachments]
    for medium in attachments:
        check_medium(model, medium.is_sound, prompt_field)
    prompt = _render(model, body, turns, begun, model.tokenizer.encode_chat)
    return with_media(model, prompt, [medium.url for medium in attachments], prompt_field)


_LEFT_OUT = "[left out: this model reads text only]"


def _turns(model: ModelInfo, body: ChatRequest) -> tuple[Conversation, Turn | None]:
    """The turns that the model reads, and the answer that is begun: the assistant's last turns, if these
    are continued and have a text."""
    turns, last = list(body.conversation), list[Turn]()
    while body.continues and turns and turns[-1].role == "assistant" and not turns[-1].calls:
        last.insert(0, turns.pop())
    texts = tuple(text for turn in last for text in turn.texts)
    texts = texts if len(last) == 1 else (PARAGRAPH.join(texts),)
    reasoning = PARAGRAPH.join(turn.reasoning for turn in last if turn.reasoning)
    begun = Turn("assistant", texts, reasoning) if any(texts) else None
    if model.media is None:
        turns = [_without_pictures(turn) if turn.role == "tool" else turn for turn in turns]
    if model.defaults.system_prompt and not any(turn.role == "system" for turn in turns):
        turns.insert(0, Turn("system", (model.defaults.system_prompt,)))
    return turns, begun


def _without_pictures(turn: Turn) -> Turn:
    """A tool's result for a model that only reads: agents send a picture with each later request, too."""
    parts = (part if isinstance(part, str) else _LEFT_OUT for part in turn.parts)
    return dataclasses.replace(turn, parts=tuple(parts)) if turn.attachments else turn


def length(model: ModelInfo, body: ChatRequest, prompt_field: str) -> PromptLength:
    """How long the prompt would be. Raises InvalidRequestError."""
    try:
        prompt, media = chat_with_media(model, body, prompt_field)
    except MediaError as error:
        raise InvalidRequestError(error.message, prompt_field) from None
    sizes = tuple(medium.size for medium in media)
    return PromptLength(model.id, len(prompt) - len(media), sizes)


def chat_prompt(model: ModelInfo, body: ChatRequest) -> tuple[int, ...]:
    """The prompt for the next turn. The first medium is -1, the second -2. Raises InvalidRequestError."""
    return _render(model, body, *_turns(model, body), model.tokenizer.encode_chat)


def rendered_tokens(model: ModelInfo, body: ChatRequest, prompt_field: str) -> tuple[int, ...]:
    """The prompt of a chat without pictures and sounds, whose tokens an engine counts. Raises
    InvalidRequestError."""
    prompt = chat_prompt(model, body)
    if any(token < 0 for token in prompt):
        raise InvalidRequestError("The tokens of pictures and sounds are not told.", prompt_field)
    return prompt


def describe_prompt(tokens: Sequence[int]) -> dict[str, Any]:
    """The figures that vLLM's routes `/render` tell of a prompt, as far as routers read it."""
    return {"request_id": uuid.uuid4().hex, "token_ids": tokens, "features": None}


def chat_text(model: ModelInfo, body: ChatRequest) -> str:
    return str(_render(model, body, *_turns(model, body), model.tokenizer.render_chat))


def _render(
    model: ModelInfo,
    body: ChatRequest,
    turns: Conversation,
    begun: Turn | None,
    render: Callable[..., T],
) -> T:
    # Templates may leave out all but the contents.
    n_chars = sum(len(turn.text) for turn in (*turns, *([begun] if begun else ())))
    refuse_far_too_long(model, "messages", n_chars)
    with more_memory(CHAR_BYTES * n_chars):
        return render(
            turns,
            body.tools_for_template(),
            _variables(model, body),
            _may_think(model, body),
            add_generation_prompt=body.add_generation_prompt is not False,
            begun=begun,
        )


def _variables(model: ModelInfo, body: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template, by the model's defaults and the request."""
    return {**model.defaults.chat_template_kwargs, **body.template_kwargs}


def _may_think(model: ModelInfo, body: ChatRequest) -> bool:
    """Whether reasoning may come first. What is off does not begin where a grammar holds the answer."""
    variables = _variables(model, body)
    is_off = any(variables.get(name) is False for name in ("enable_thinking", "thinking"))
    return body.may_think and not (is_off and body.constraint is not None)


def chat_sampling(
    model: ModelInfo, body: ChatRequest, prompt: Sequence[int], *, is_begun: bool = False
) -> SamplingParams:
    """The engine's parameters of the answer to this prompt, which may have its beginning. Raises
    InvalidRequestError."""
    grammar = _chat_grammar(model, body, prompt, is_begun=is_begun)
    params = sampling(model, body)
    return params if grammar is None else dataclasses.replace(params, grammar=grammar)


def _chat_grammar(
    model: ModelInfo, body: ChatRequest, prompt: Sequence[int], *, is_begun: bool
) -> str | None:
    """The grammar of calls and of the answer's schema, if the request or the model's format needs one."""
    dialect, constraint = model.tokenizer.dialect(prompt), body.constraint
    if is_begun:
        dialect = dataclasses.replace(dialect, thinking=ThinkingPhase.BEHIND)
    elif not _may_think(model, body):
        dialect = dataclasses.replace(dialect, thinking=ThinkingPhase.OFF)
    schema = constraint if constraint is not None and constraint.kind == "schema" else None
    tool_format = dialect.tool_format
    # Text that is begun is not in the form to which a format may hold all answers.
    holds = body.holds_calls or (tool_format.holds_answers and not is_begun)
    if not (body.offered_tools and holds):
        return None if schema is None else schema.grammar(dialect)
    forced = body.forced_tools()
    parallel = body.parallel_tool_calls
    names = FunctionNames(tool.function.name for tool in body.offered_tools)
    functions = [tool.function.model_dump() for tool in forced or body.offered_tools]
    return grammars.from_tool_calls(
        [function | {"name": names.of_model(function["name"])} for function in functions],
        dialect,
        forced=bool(forced),
        # A model that must call, or that knows no format of calls, may call without end.
        parallel=parallel is True if forced or tool_format.holds_answers else parallel is not False,
        param="tools",
        answer=None if schema is None else schema.form,
        loosened=name_ignored,
    )
