"""Reads bodies of requests for embeddings, rankings and classes, and writes the answers. Runs in workers.

An answer may be as long as a book.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from serve_app.base.errors import InvalidRequestError, NotSupportedError
from serve_app.server.answering.messages import ChatCompletionRequest, ChatMessage
from serve_app.server.answering.preparation import chat_with_media
from serve_app.server.answering.prompts import MediaPrompt, Mixed, Prompt, plain, several
from serve_app.server.answering.requests import Text
from serve_app.server.answering.vectors import (
    ComputedVectors,
    Texts,
    TextsToEmbed,
    Vectors,
    check_has_vectors,
    check_makes_embeddings,
    check_texts,
    cut_text,
    normalize,
    to_embed,
)
from serve_app.server.http.request_model import ModelledRequest, RequestModel
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import ModelInfo, Models, find

MAX_TEXTS = 2048
"""Texts in one request, as at OpenAI."""
_Batch = Field(min_length=1, max_length=MAX_TEXTS)


class TextsRequest(ModelledRequest):
    """Texts, or a chat, of which a model makes numbers."""

    input: Annotated[Prompt | None, Field(validation_alias=AliasChoices("input", "content"))] = None
    """A text, token ids and texts mixed, or a text with pictures; or several of them."""
    messages: list[ChatMessage] | None = None
    """vLLM's: a chat in the place of the input, as the model's template writes it."""
    truncate: bool = False
    """Jina's: whether texts that are too long are cut, and not refused."""
    user: str | None = None
    """The user whose texts these are, without API keys: the engine is shared fairly among clients."""

    @field_validator("input", mode="wrap")
    @classmethod
    def _say_what_it_may_be(cls, value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(plain(value))
        except ValidationError:
            raise _wrong_input() from None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if self.messages is not None:
            return self
        if self.input is None:
            raise InvalidRequestError("Field required: 'input'.", "input")
        if [] in self.texts or not 0 < len(self.texts) <= MAX_TEXTS:
            raise _wrong_input()
        return self

    @property
    def texts(self) -> list[str | Mixed | MediaPrompt]:
        return [] if self.input is None else several(self.input)


class EmbeddingsRequest(TextsRequest):
    """POST /v1/embeddings, and llama-server's POST /embedding."""

    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or base64 of little-endian 32-bit floats, which /embedding never has."""
    embd_normalize: Annotated[int, Field(ge=-1, le=100)] = 2
    """-1 for no normalisation; 0 for the largest number as 32760, 2 for length 1, others for p-norms."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many numbers, of length 1 again: for models that are made for it."""
    prompt_name: str | None = None
    """Sentence Transformers': the instruction before each text, of the model's `defaults.prompts`."""
    input_type: str | None = None
    """Cohere's: the same. A name that the model does not have is ignored."""


class ClassifyRequest(TextsRequest):
    """POST /v1/classify, as vLLM has it."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """The first tokens of each text that are kept; -1 for as many as the model takes."""
    use_activation: bool = True
    """Whether the answer has probabilities, and not the classifier's own outputs."""


def _wrong_input() -> InvalidRequestError:
    return InvalidRequestError(
        f"'input' must be a text, a list of token ids, a text with pictures, or a list of up to "
        f"{MAX_TEXTS} of these; none may be empty.",
        "input",
    )


class TeiEmbedRequest(ModelledRequest):
    """POST /embed, as text-embeddings-inference has it."""

    inputs: Text | Annotated[list[Text], _Batch]
    normalize: bool = True
    """Whether vectors have a length of 1."""
    truncate: bool = False
    """Whether texts that are too long are cut, and not refused."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    """The instruction before each text, of the model's `defaults.prompts`."""


class Document(RequestModel):
    """A document that is an object, as Cohere's and Jina's clients may send it."""

    text: Text


class RerankRequest(ModelledRequest):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], _Batch] = Field(
        validation_alias=AliasChoices("documents", "texts")
    )
    """The texts to rank. By the name `texts`, the answer is a list, as from text-embeddings-inference."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """How many of the most relevant to give; all by default."""
    return_documents: bool = Field(
        default=False, validation_alias=AliasChoices("return_documents", "return_text")
    )
    """Whether the answer repeats the texts."""
    truncate: bool = False
    """Whether a query and a document that are too long together are cut, and not refused."""
    _is_tei: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _note_form(cls, data: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made = make(data)
        made._is_tei = isinstance(data, dict) and "texts" in data
        return made

    @property
    def is_tei(self) -> bool:
        return self._is_tei

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


_Side = Text | Annotated[list[Text], _Batch]


class ScoreRequest(ModelledRequest):
    """POST /v1/score, as vLLM has it: a query for all documents, or a query for each."""

    queries: _Side = Field(validation_alias=AliasChoices("queries", "text_1"))
    documents: _Side = Field(validation_alias=AliasChoices("documents", "text_2"))
    use_activation: bool = True
    """Whether scores are between 0 and 1, by the logistic function."""
    truncate: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each query with its document. Raises InvalidRequestError for numbers that do not match."""
        queries, documents = (
            [side] if isinstance(side, str) else side for side in (self.queries, self.documents)
        )
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            message = f"{len(queries)} queries are given for {len(documents)} documents."
            raise InvalidRequestError(message, "queries")
        return list(zip(queries, documents, strict=True))


def embeddings(models: Models, request: EmbeddingsRequest) -> TextsToEmbed:
    """POST /v1/embeddings. Raises CorralError."""
    return _embeddings(models, request, check_makes_embeddings)


def llama_embedding(models: Models, request: EmbeddingsRequest) -> TextsToEmbed:
    """POST /embedding. Raises CorralError."""
    return _embeddings(models, request, check_has_vectors)


def _embeddings(
    models: Models, request: EmbeddingsRequest, check: Callable[[ModelInfo], None]
) -> TextsToEmbed:
    model = find(models, request.model)
    check(model)
    _check_dimensions(model, request.dimensions)
    prompt = _prompt(model, request.prompt_name, request.input_type)
    return replace(
        _texts_to_embed(model, request, prompt, cut=request.truncate),
        dimensions=request.dimensions,
        as_base64=request.encoding_format == "base64",
        norm=request.embd_normalize,
    )


def _check_dimensions(model: ModelInfo, dimensions: int | None) -> None:
    n_embd = model.tokenizer.model.n_embd
    if dimensions is not None and dimensions > n_embd:
        message = f"dimensions: this model's embeddings have {n_embd}."
        raise InvalidRequestError(message, "dimensions")


def _texts_to_embed(
    model: ModelInfo, request: TextsRequest, instruction: str = "", *, cut: bool
) -> TextsToEmbed:
    """The request's texts, or its chat. Raises CorralError."""
    if request.messages is None:
        texts = to_embed(model, request.texts, "input", instruction, cut=cut)
    else:
        chat = ChatCompletionRequest(
            messages=request.messages, add_generation_prompt=False, continue_final_message=False
        )
        tokens, media = chat_with_media(model, chat, "messages")
        cut = cut and not media
        texts = TextsToEmbed(model.id, check_texts(model, [tokens], "messages", cut=cut), media)
    return replace(texts, user=request.user)


def classify(models: Models, request: ClassifyRequest) -> TextsToEmbed:
    """POST /v1/classify. Raises CorralError."""
    model, most = find(models, request.model), request.truncate_prompt_tokens
    _check_has_classifier(model, "classify", "classification")
    order = _texts_to_embed(model, request, cut=request.truncate or most is not None)
    if most is not None and most >= 0:
        texts = tuple(cut_text(model, tokens, most) for tokens in order.texts)
        order = replace(order, texts=check_texts(model, texts, "truncate_prompt_tokens"))
    return replace(order, norm=2 if request.use_activation else -1)


def tei_embed(models: Models, request: TeiEmbedRequest) -> TextsToEmbed:
    """POST /embed. Raises CorralError."""
    model = find(models, request.model)
    check_makes_embeddings(model)
    _check_dimensions(model, request.dimensions)
    inputs = [request.inputs] if isinstance(request.inputs, str) else [*request.inputs]
    prompt = _prompt(model, request.prompt_name)
    made = to_embed(model, inputs, "inputs", prompt, cut=request.truncate)
    return replace(made, norm=2 if request.normalize else -1, dimensions=request.dimensions)


def _prompt(model: ModelInfo, name: str | None, hint: str | None = None) -> str:
    """The instruction of that name. Raises InvalidRequestError for an unknown name, but not for a hint."""
    known = model.defaults.prompts
    if name is not None and name not in known:
        names = ", ".join(known) or "none"
        raise InvalidRequestError(
            f"The model {model.id!r} has no prompt {name!r}. It has: {names}.", "prompt_name"
        )
    return known.get(name or hint or "", "")


@dataclass(frozen=True, slots=True)
class PairsToRank:
    """The prepared request for scores of pairs of texts."""

    model: str
    texts: Texts
    top_n: int | None = None
    is_tei: bool = False
    """Whether the answer is a list."""
    documents: tuple[str, ...] | None = None
    """The texts that the answer repeats, if it does."""
    is_logistic: bool = False
    """Whether scores become numbers between 0 and 1."""


def rerank(models: Models, request: RerankRequest) -> PairsToRank:
    """POST /v1/rerank. Raises CorralError."""
    pairs = [(request.query, text) for text in request.texts]
    model, texts = _tokenize_pairs(models, request, pairs)
    told = tuple(request.texts) if request.return_documents else None
    return PairsToRank(model.id, texts, request.top_n, request.is_tei, told)


def score(models: Models, request: ScoreRequest) -> PairsToRank:
    """POST /v1/score. Raises CorralError."""
    model, texts = _tokenize_pairs(models, request, request.pairs)
    is_logistic = request.use_activation and not model.tokenizer.model.has_softmax
    return PairsToRank(model.id, texts, is_logistic=is_logistic)


def _tokenize_pairs(
    models: Models, request: RerankRequest | ScoreRequest, pairs: Sequence[tuple[str, str]]
) -> tuple[ModelInfo, Texts]:
    """The model, and the tokens of each pair. Raises CorralError."""
    model = find(models, request.model)
    _check_has_classifier(model, "rank", "reranking")
    if not model.tokenizer.reranks:
        labels = model.tokenizer.labels
        raise NotSupportedError(
            f"The model {model.id!r} cannot rank. Its classifier has {len(labels)} outputs, and none of "
            f"them says how relevant a text is: {', '.join(labels[:5])}. Use /v1/classify.",
            "model",
        )
    encoded = [model.tokenizer.encode_pair(*pair) for pair in pairs]
    return model, check_texts(model, encoded, "documents", cut=request.truncate)


def _check_has_classifier(model: ModelInfo, verb: str, kind: str) -> None:
    if not model.tokenizer.has_classifier:
        raise NotSupportedError(
            f"The model {model.id!r} cannot {verb}. Its file does not name the pooling type 'rank', "
            f"as files of {kind} models do. If it is one, set `engine.embedding_pooling: rank`.",
            "model",
        )


def openai_answer(models: Models, body: bytes) -> bytes:
    """The answer to POST /v1/embeddings, as JSON. The body is of `ComputedVectors.pieces`."""
    result, vectors = ComputedVectors.of(body)
    return encode_json(
        {
            "object": "list",
            "model": result.model,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": in_base64(vector) if result.as_base64 else vector,
                }
                for i, vector in enumerate(normalize(vectors, result.norm))
            ],
            "usage": usage_json(result.n_tokens),
        }
    )


def llama_answer(models: Models, body: bytes) -> bytes:
    """The answer to POST /embedding, as JSON. The body is of `ComputedVectors.pieces`."""
    result, vectors = ComputedVectors.of(body)
    if result.lengths is None:
        of_texts = list(normalize(vectors, result.norm)[:, np.newaxis])
    else:
        of_texts = np.split(vectors, np.cumsum(result.lengths)[:-1])
    return encode_json([{"index": i, "embedding": one} for i, one in enumerate(of_texts)])


def tei_answer(models: Models, body: bytes) -> bytes:
    """The answer to POST /embed, as JSON. The body is of `ComputedVectors.pieces`."""
    result, vectors = ComputedVectors.of(body)
    return encode_json(normalize(vectors, result.norm))


def classify_answer(models: Models, body: bytes) -> bytes:
    """The answer to POST /v1/classify, as JSON. The body is of `ComputedVectors.pieces`."""
    result, outputs = ComputedVectors.of(body)
    tokenizer = find(models, result.model).tokenizer
    labels = tokenizer.labels or ("LABEL_0",)  # Transformers' name of what has none
    probs = outputs.astype(np.float64)
    if result.norm >= 0 and not tokenizer.model.has_softmax:
        probs = probabilities(probs)
    data = [
        {"index": i, "label": labels[row.argmax()], "probs": row, "num_classes": len(row)}
        for i, row in enumerate(probs)
    ]
    return encode_json(
        {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": result.model,
            "data": data,
            "usage": usage_json(result.n_tokens),
        }
    )


def probabilities(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The classes' probabilities by a classifier's outputs: the softmax, or the logistic function of a
    single output. Source: vLLM, `PoolerClassify`."""
    if outputs.shape[1] == 1:
        return 1 / (1 + np.exp(-outputs))
    shares: NDArray[np.float64] = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def usage_json(n_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def in_base64(vector: Vectors) -> str:
    """The vector as OpenAI's clients read it: little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
