"""Turns bodies of llama-server's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from serve_app.apis.llama_server.protocol import (
    AdapterChange,
    AnyTokenizeRequest,
    DetokenizeRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaParams,
    LoraAdapter,
    ModelRequest,
    PropsRequest,
    SlotRequest,
    TokenizeChat,
    TokenizePrompt,
    TokenizeRequest,
)
from serve_app.base.sampling import SamplingParams, Triggers
from serve_app.base.values.media import Medium
from serve_app.server.answering import preparation
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.answering.preparation import (
    CHAR_BYTES,
    Generation,
    refuse_huge,
    refuse_unknown_tokens,
    tokenize_checked,
)
from serve_app.server.answering.prompts import MediaPrompt, media_prompt, mixed_tokens
from serve_app.server.http.request_model import parse_body
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import ModelInfo, Models, find
from serve_app.server.workers.worker import grant_memory


@dataclass(frozen=True, slots=True)
class PreparedLlamaCompletion:
    """The prepared request for texts."""

    generation: Generation
    prompt_texts: tuple[str, ...]
    """The prompts as the model gets them."""
    is_batch: bool
    """Whether the answer is a list."""
    return_tokens: bool
    response_fields: tuple[str, ...] | None
    grammar: str
    """The grammar, as the request has it."""
    triggers: tuple[dict[str, Any], ...] = ()
    """The triggers of the grammar, as the request has them."""


def llama_completion(models: Models, request: LlamaCompletionRequest) -> PreparedLlamaCompletion:
    """POST /completion. Raises CorralError."""
    model = find(models, request.model)
    if isinstance(request.prompt, MediaPrompt):
        prompt, media = media_prompt(model, request.prompt, "prompt")
        return _completion(model, request, [prompt], is_batch=request.is_batch, media=media)
    prompts = [mixed_tokens(model, prompt, "prompt") for prompt in request.prompts]
    return _completion(model, request, prompts, is_batch=request.is_batch)


def infill(models: Models, request: InfillRequest) -> PreparedLlamaCompletion:
    """POST /infill. Raises CorralError."""
    model = find(models, request.model)
    return _completion(model, request, [_infill_prompt(model, request)], is_batch=False)


def _completion(
    model: ModelInfo,
    request: LlamaParams,
    prompts: list[tuple[int, ...]],
    *,
    is_batch: bool,
    media: tuple[Medium, ...] = (),
) -> PreparedLlamaCompletion:
    sampling, n = _with_triggers(model, request), request.n_answers
    fields = request.response_fields
    return PreparedLlamaCompletion(
        preparation.make_generation(model, request, prompts, n, sampling, "prompt", media),
        tuple(model.tokenizer.decode(prompt, special=True) for prompt in prompts),
        is_batch,
        request.return_tokens,
        None if fields is None else tuple(fields),
        request.grammar or "",
        tuple(trigger.model_dump(exclude_none=True) for trigger in request.grammar_triggers),
    )


def _with_triggers(model: ModelInfo, request: LlamaParams) -> SamplingParams:
    """The engine's parameters. A word that is a token of its own is that token, as at llama-server."""
    sampling = preparation.sampling(model, request)
    encode = model.tokenizer.tokenize
    preserved = [encode(text, False, True) for text in request.preserved_tokens]
    if request.grammar_lazy and sampling.grammar is not None:
        ids, texts = set[int](), list[str]()
        for trigger in request.grammar_triggers:
            tokens = encode(trigger.value, False, True)
            if trigger.token is not None:
                ids.add(trigger.token)
            elif len(tokens) == 1:
                ids.add(tokens[0])
            else:
                texts.append(trigger.value)
        refuse_unknown_tokens(model, "grammar_triggers", ids)
        sampling = replace(sampling, triggers=Triggers(tuple(sorted(ids)), tuple(texts)))
    kept = tuple(sorted({tokens[0] for tokens in preserved if len(tokens) == 1}))
    return replace(sampling, preserved_tokens=kept) if kept else sampling


def _infill_prompt(model: ModelInfo, request: InfillRequest) -> tuple[int, ...]:
    """Other files come before the texts. Their beginning is left out if it would leave less than a quarter
    of the context for the answer."""
    texts = request.input_prefix, request.input_suffix, request.prompt
    encode, encode_files = model.tokenizer.encode_infill, model.tokenizer.encode_infill_files
    prompt = tokenize_checked(model, "prompt", sum(map(len, texts)), encode, *texts)
    files = [(file.filename, file.text) for file in request.input_extra or ()]
    n_chars = sum(len(name) + len(text) for name, text in files)
    extra = tokenize_checked(model, "input_extra", n_chars, encode_files, files)
    room = max(0, model.n_ctx_slot * 3 // 4 - len(prompt))
    return (*extra[max(0, len(extra) - room) :], *prompt)


def tokenize(models: Models, request: AnyTokenizeRequest) -> bytes:
    """POST /tokenize: the answer, as JSON. Raises CorralError."""
    model = find(models, request.model)
    if not isinstance(request, TokenizeRequest):
        return _tokens_as_vllm(model, request)
    tokenizer = model.tokenizer
    refuse_huge("content", len(request.content))
    grant_memory(2 * CHAR_BYTES * len(request.content))  # for the answer, too
    tokens = tokenizer.tokenize(request.content, request.add_special, request.parse_special)
    if not request.with_pieces:
        return encode_json({"tokens": tokens})
    pieces = [(token, tokenizer.piece(token, special=True)) for token in tokens]
    return encode_json(
        {"tokens": [{"id": token, "piece": _encode_piece(piece)} for token, piece in pieces]}
    )


def _tokens_as_vllm(model: ModelInfo, request: TokenizePrompt | TokenizeChat) -> bytes:
    """The answer in vLLM's form. Source: vLLM, entrypoints/serve/tokenize/protocol.py."""
    if isinstance(request, TokenizeChat):
        tokens = preparation.rendered_tokens(model, request, "messages")
    else:
        refuse_huge("prompt", len(request.prompt))
        grant_memory(2 * CHAR_BYTES * len(request.prompt))
        tokens = model.tokenizer.tokenize(request.prompt, request.add_special_tokens, True)
    told = request.return_token_strs
    return encode_json(
        {
            "count": len(tokens),
            "max_model_len": model.n_ctx_slot,
            "tokens": tokens,
            "token_strs": list(map(model.tokenizer.model.text_of, tokens)) if told else None,
        }
    )


def _encode_piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(models: Models, request: DetokenizeRequest) -> bytes:
    """POST /detokenize: the answer, as JSON, by llama-server's name and by vLLM's. Raises CorralError."""
    model = find(models, request.model)
    refuse_unknown_tokens(model, "tokens", request.tokens)
    text = model.tokenizer.decode(request.tokens, special=True)
    return encode_json({"content": text, "prompt": text})


def apply_template(models: Models, request: ChatCompletionRequest) -> bytes:
    """POST /apply-template: the answer, as JSON. Raises CorralError."""
    return encode_json({"prompt": preparation.chat_text(find(models, request.model), request)})


def slot_request(models: Models, body: bytes) -> SlotRequest:
    """POST /slots/{id_slot}. Raises InvalidRequestError."""
    return parse_body(SlotRequest, body) if body else SlotRequest()


def named_model(models: Models, request: ModelRequest) -> str:
    """POST /models, /models/load and /models/unload: the model's name. Raises InvalidRequestError."""
    return request.model


def properties(models: Models, body: bytes) -> None:
    """POST /props. Raises InvalidRequestError for what is no JSON object."""
    parse_body(PropsRequest, body or b"{}")


def adapters(models: Models, body: bytes) -> tuple[AdapterChange | None, tuple[LoraAdapter, ...]]:
    """POST /lora-adapters: what is to be loaded or unloaded, or scales. Raises InvalidRequestError."""
    if body.lstrip().startswith(b"{"):
        return parse_body(AdapterChange, body), ()
    return None, tuple(parse_body(list[LoraAdapter], body))
