"""The routes of OpenAI's completions, chat completions and models.

Source: OpenAI's API reference, "Completions", "Chat" and "Models".
"""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import Request
from fastapi.responses import Response

from serve_app.apis.openai import preparation
from serve_app.apis.openai.preparation import PreparedCompletion
from serve_app.apis.openai.serving import Answer, Choice
from serve_app.server.answering import streaming
from serve_app.server.answering.openai_answers import (
    AnthropicModelCard,
    AnthropicModelList,
    InputTokens,
    ModelCard,
    ModelList,
    model_card,
    model_cards,
)
from serve_app.server.answering.preparation import Chat, PromptLength
from serve_app.server.http.dependencies import ModelsArgument, bytes_response, prepare_with
from serve_app.server.http.description import CHAT, SHORT_CHAT, STREAMED, api_router
from serve_app.server.model_registry import find

ROUTER = api_router()


@ROUTER.post("/v1/completions", responses=STREAMED)
async def completions(
    models: ModelsArgument,
    completion: Annotated[
        PreparedCompletion,
        prepare_with(
            preparation.completion,
            example={"prompt": "The capital of Portugal is", "max_tokens": 8},
        ),
    ],
) -> Response:
    """Continue texts; `stream` sends server-sent events."""
    plan, n = completion.generation, completion.generation.n
    model = find(models, plan.model)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    piece = model.tokenizer.piece if completion.logprobs else None
    echoed = plan.sampling.prompt_logprobs
    choices = [
        Choice(i * n + j, "text", piece, echo=echo, prompt=plan.prompts[i] if echoed else ())
        for i, echo in enumerate(completion.echoes)
        for j in range(n)
    ]
    answer = Answer("text", answer_id, model.id, choices, plan, completion.n_best)
    return await answer.respond(model, plan, answer_id)


@ROUTER.post("/v1/chat/completions", responses=STREAMED)
@ROUTER.post("/chat/completions", responses=STREAMED)
async def chat_completions(
    request: Request,
    models: ModelsArgument,
    chat: Annotated[Chat, prepare_with(preparation.chat, example=SHORT_CHAT)],
) -> Response:
    """Answer a chat through the model's own template; `stream` sends server-sent events."""
    plan = chat.generation
    model = find(models, plan.model)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    piece = model.tokenizer.piece if plan.sampling.logprobs is not None else None
    choices = [
        Choice(
            i,
            "chat",
            piece,
            streaming.output_parser(model, chat),
            chat.prefill,
            shares=plan.sampling.post_sampling_probs,
            custom_tools=chat.custom_tools,
            tokenizer=model.tokenizer,
        )
        for i in range(plan.n)
    ]
    answer = Answer("chat", answer_id, model.id, choices, plan)
    if chat.verbose:
        answer.verbose = {"prompt": model.tokenizer.decode(chat.prompt, special=True)}
    return await answer.respond(model, plan, answer_id)


@ROUTER.post("/v1/chat/completions/input_tokens")
@ROUTER.post("/chat/completions/input_tokens")
async def input_tokens(
    models: ModelsArgument,
    length: Annotated[PromptLength, prepare_with(preparation.input_tokens, example=CHAT)],
) -> InputTokens:
    """How many tokens the prompt of such a chat has."""
    return InputTokens(input_tokens=await streaming.n_tokens(models, length))


@ROUTER.post("/v1/chat/completions/render")
async def render_chat(
    answer: Annotated[bytes, prepare_with(preparation.render_chat, example=CHAT)],
) -> Response:
    """The tokens of such a chat's prompt, which vLLM's routers ask for."""
    return bytes_response(answer)


@ROUTER.post("/v1/completions/render")
async def render_completion(
    answer: Annotated[
        bytes, prepare_with(preparation.render_completion, example={"prompt": "A fox."})
    ],
) -> Response:
    """The tokens of each prompt of such a completion, which vLLM's routers ask for."""
    return bytes_response(answer)


@ROUTER.get("/v1/models")
@ROUTER.get("/models")
async def list_models(request: Request, models: ModelsArgument) -> AnthropicModelList | ModelList:
    """The models that you may use, the default first. With the header `anthropic-version`, the answer has
    Anthropic's fields, too."""
    data = model_cards(models)
    if "anthropic-version" not in request.headers:
        return ModelList(data=data)
    cards = [AnthropicModelCard.of(card) for card in data]
    ends = (cards[0].id, cards[-1].id) if cards else (None, None)
    return AnthropicModelList(data=cards, first_id=ends[0], last_id=ends[1])


@ROUTER.get("/v1/models/{model_id:path}")
async def get_model(
    request: Request, models: ModelsArgument, model_id: str
) -> AnthropicModelCard | ModelCard:
    """The model with that name."""
    card = model_card(find(models, model_id))
    return AnthropicModelCard.of(card) if "anthropic-version" in request.headers else card
