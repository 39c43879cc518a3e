"""From chats to the engine's requests, and from deltas to content and calls, for every chat protocol."""

from __future__ import annotations

import dataclasses

from serve_app.ingress.generation import generation
from serve_app.ingress.generation.tokenization import (
    in_thread_if_long,
    refuse_far_too_long,
    sampling_of,
)
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.openai.protocol import ChatCompletionRequest
from serve_app.prompt import grammars
from serve_app.prompt.output_parser import OutputParser, Part, Reasoning
from serve_app.prompt.tool_calls import ToolCall
from serve_app.sampling import SamplingParams
from serve_app.types import GenerationRequest, TokenDelta


def with_calls(model: ServedModel, body: ChatCompletionRequest) -> SamplingParams:
    """The sampling parameters, with what calls must be like, if the request says so."""
    sampling = body.sampling(body.max_completion_tokens or body.max_tokens)
    tool_format = model.tokenizer.tool_format
    if not body.holds_calls or tool_format is None:
        return sampling
    forced = body.forced_tools()
    grammar = grammars.from_tool_calls(
        [tool.function.model_dump() for tool in forced or body.tools],
        tool_format,
        model.tokenizer.delimiter_token,
        forced=bool(forced),
        parallel=body.parallel_tool_calls is not False,
        param="tools",
    )
    return dataclasses.replace(sampling, grammar=grammar)


async def encode_chat(model: ServedModel, body: ChatCompletionRequest) -> tuple[int, ...]:
    """The prompt that asks for the chat's next turn. Raises InvalidRequestError."""
    messages = [message.for_template() for message in body.messages]
    tools, extra = body.tools_for_template(), body.chat_template_kwargs
    n_chars = sum(len(message["content"]) for message in messages)
    refuse_far_too_long(model, "messages", n_chars)
    encode = model.tokenizer.encode_chat
    n_chars += len(str(tools))
    return await in_thread_if_long(n_chars, encode, messages, tools, extra, body.may_think)


async def requests(
    model: ServedModel, answer_id: str, body: ChatCompletionRequest, n: int, prompt_field: str
) -> list[GenerationRequest]:
    """The requests for `n` answers to a chat. Raises InvalidRequestError, and what `generation.requests`
    does."""
    sampling = await sampling_of(body, lambda: with_calls(model, body))
    prompt = await encode_chat(model, body)
    return generation.requests(model, answer_id, [prompt], n, body, sampling, prompt_field)


def parser(
    model: ServedModel, body: ChatCompletionRequest, prompt: tuple[int, ...]
) -> OutputParser:
    """What splits an answer to this chat, whose prompt is this."""
    thinks = body.reasoning_format != "none"
    return model.tokenizer.output_parser(prompt, body.tools_for_template(), thinks)


def parts(parser: OutputParser, delta: TokenDelta) -> list[Part]:
    """What the delta's text is certain to be now; none of it is empty."""
    found = parser.feed(delta.text)
    return found if delta.end is None else found + parser.finish()


def split(parser: OutputParser, delta: TokenDelta) -> list[str | ToolCall]:
    """The same without reasoning."""
    return [part for part in parts(parser, delta) if not isinstance(part, Reasoning)]
