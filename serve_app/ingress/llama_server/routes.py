"""llama-server's own routes, under its names.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve_app import __version__
from serve_app.ingress.generation import generation
from serve_app.ingress.generation.tokenization import (
    apart,
    encoded,
    refuse_unknown_tokens,
    sampling_of,
)
from serve_app.ingress.http import sse
from serve_app.ingress.llama_server import metrics as llama_metrics
from serve_app.ingress.llama_server import serving
from serve_app.ingress.llama_server import slots as llama_slots
from serve_app.ingress.llama_server.protocol import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaParams,
    TokenizeRequest,
)
from serve_app.ingress.llama_server.serving import LlamaAnswer
from serve_app.ingress.llama_server.slots import slots_of
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.types import SamplingParams


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes."""
    _add_generation(app, models)
    _add_text(app, models)
    _add_information(app, models)
    llama_slots.add(app, models)


def _add_generation(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/completion", response_model=None)
    @app.post("/completions", response_model=None)
    async def completion(body: LlamaCompletionRequest) -> Response:
        """Continue texts, llama-server's way."""
        model = find(models, body.model)
        prompts = [await encode(model, prompt, "prompt") for prompt in body.prompts]
        return await _respond(model, body, prompts, is_batch=body.is_batch)

    @app.post("/infill", response_model=None)
    async def infill(body: InfillRequest) -> Response:
        """Fill in what is between two texts, for models with tokens for that."""
        model = find(models, body.model)
        return await _respond(model, body, [await _encode_infill(model, body)], is_batch=False)


async def _encode_infill(model: ServedModel, body: InfillRequest) -> tuple[int, ...]:
    """Other files come before the texts; of those, the beginning is left out, if it would leave less than a
    quarter of the context for the answer."""
    texts = body.input_prefix, body.input_suffix, body.prompt
    encode, encode_files = model.tokenizer.encode_infill, model.tokenizer.encode_infill_files
    prompt = await encoded(model, "prompt", sum(map(len, texts)), encode, *texts)
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    n_chars = sum(len(name) + len(text) for name, text in files)
    extra = await encoded(model, "input_extra", n_chars, encode_files, files)
    room = max(0, model.n_ctx_slot * 3 // 4 - len(prompt))
    return (*extra[max(0, len(extra) - room) :], *prompt)


async def encode(model: ServedModel, prompt: str | list[int | str], field: str) -> tuple[int, ...]:
    """Texts among token ids are tokenized where they stand; only one at the beginning gets a BOS."""
    parts: list[int | str] = [prompt] if isinstance(prompt, str) else prompt
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            refuse_unknown_tokens(model, field, [part])
            tokens.append(part)
        else:
            encode = model.tokenizer.tokenize
            tokens += await encoded(model, "prompt", len(part), encode, part, i == 0, True)
    return tuple(tokens)


async def _respond(
    model: ServedModel, body: LlamaParams, prompts: list[tuple[int, ...]], *, is_batch: bool
) -> Response:
    sampling = await sampling_of(body, lambda: _biased(model, body))
    answer_id, n = f"cmpl-{uuid.uuid4().hex}", body.n_answers
    wanted = generation.requests(model, answer_id, prompts, n, body, sampling, "prompt")
    tokenizer = model.tokenizer
    choices = [
        LlamaAnswer(
            index=i,
            model=model.id,
            prompt=tokenizer.decode(request.prompt, special=True),
            n_prompt=len(request.prompt),
            n_ctx_slot=model.n_ctx_slot,
            body=body,
            sampling=request.sampling,
            piece=tokenizer.piece,
        )
        for i, request in enumerate(wanted)
    ]
    deltas = await generation.start(model, wanted)
    if body.stream:
        return sse.response(serving.events(choices[0], deltas))
    found = await serving.collect(choices, deltas)
    return JSONResponse(found if is_batch else found[0])


def _biased(model: ServedModel, body: LlamaParams) -> SamplingParams:
    """The sampling parameters, with `logit_bias` in llama-server's form."""
    sampling = body.llama_sampling()
    bias = list(sampling.logit_bias)
    for which, value in body.token_bias or ():
        tokens = (
            [which] if isinstance(which, int) else model.tokenizer.tokenize(which, False, False)
        )
        bias += [(token, float("-inf") if value is False else float(value)) for token in tokens]
    return generation.with_bias(sampling, bias)


def _add_text(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, list[Any]]:
        """A text's tokens."""
        tokenizer = find(models, body.model).tokenizer
        special = body.add_special, body.parse_special
        tokens = await apart(len(body.content), tokenizer.tokenize, body.content, *special)
        if not body.with_pieces:
            return {"tokens": list(tokens)}
        pieces = [(token, tokenizer.piece(token, special=True)) for token in tokens]
        return {"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pieces]}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens."""
        model = find(models, body.model)
        refuse_unknown_tokens(model, "tokens", body.tokens)
        return {"content": model.tokenizer.decode(body.tokens, special=True)}

    @app.post("/apply-template")
    async def apply_template(body: ApplyTemplateRequest) -> dict[str, str]:
        """A chat as the text that the model gets."""
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tools]
        tokenizer = find(models, body.model).tokenizer
        return {"prompt": tokenizer.render_chat(messages, tools, body.chat_template_kwargs)}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _add_information(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """What the model is served with; slots are those of all its replicas that answer in time, and
        `missing` names the others."""
        found = find(models, model)
        defaults = serving.generation_settings(SamplingParams(), found.n_ctx_slot, found.id)
        slots = await slots_of(found)
        return {
            "missing": slots.missing,
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": found.n_ctx_slot,
                "speculative": False,
                "is_processing": False,
                "params": defaults,
                "prompt": "",
            },
            "total_slots": len(slots.found),
            "model_alias": found.id,
            "model_path": found.tokenizer.path,
            "chat_template": found.tokenizer.chat_template or "",
            "bos_token": found.tokenizer.bos,
            "eos_token": found.tokenizer.eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"corral-{__version__}",
            "is_sleeping": False,
        }

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(model: str | None = None) -> Response:
        """llama-server's metrics, summed over the replicas of the model."""
        answers = await find(models, model).engine.stats()
        text = llama_metrics.render(answers.found, len(answers.missing))
        return Response(text, media_type=CONTENT_TYPE_LATEST)
