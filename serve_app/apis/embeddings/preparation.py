"""Reads bodies of requests for embeddings, rankings and classes, and writes the answers. Runs in workers.

An answer may be as long as a book.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from serve_app import __version__
from serve_app.base.errors import InvalidRequestError, NotSupportedError, TextTooLongError
from serve_app.prompt.tokenizer import keep_first
from serve_app.server.answering.messages import ChatCompletionRequest, ChatMessage
from serve_app.server.answering.preparation import CHAR_BYTES, chat_with_media, refuse_huge
from serve_app.server.answering.prompts import MediaPrompt, Mixed, Prompt, plain, several
from serve_app.server.answering.requests import Text
from serve_app.server.answering.vectors import (
    MAX_TOKENS,
    ComputedVectors,
    TextCut,
    Texts,
    TextsToEmbed,
    Vectors,
    check_has_vectors,
    check_makes_embeddings,
    check_texts,
    normalize,
    to_embed,
)
from serve_app.server.http.request_model import ModelledRequest, RequestModel
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import ModelInfo, Models, find
from serve_app.server.workers.worker import more_memory

MAX_TEXTS = 2048
"""Texts in one request, as at OpenAI."""
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_INT8_MAX = 127
_Batch = Field(min_length=1, max_length=MAX_TEXTS)


class CutRequest(ModelledRequest):
    """A request with texts that may be cut."""

    truncate: bool = False
    """Jina's and text-embeddings-inference's: whether texts that are too long are cut, and not refused. Of
    a query and a document, the longer one is cut first."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """vLLM's: the tokens of each text that are kept; -1 for as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """vLLM's: the side where a text is cut; `right` by default."""

    @property
    def cut(self) -> TextCut | None:
        """How texts are cut; None if they are not."""
        n_most = self.truncate_prompt_tokens
        if n_most is None and not self.truncate:
            return None
        return TextCut(None if n_most == -1 else n_most, self.truncation_side or "right")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


_Side = Annotated[
    Literal["left", "right"] | None,
    Field(validation_alias=AliasChoices("truncation_side", "truncation_direction")),
    BeforeValidator(_lower),
]
"""text-embeddings-inference has another name for the side, and begins it with a capital."""


class TextsRequest(CutRequest):
    """Texts, or a chat, of which a model makes numbers."""

    input: Annotated[Prompt | None, Field(validation_alias=AliasChoices("input", "content"))] = None
    """A text, token ids and texts mixed, or a text with pictures; or several of them."""
    messages: list[ChatMessage] | None = None
    """vLLM's: a chat in the place of the input, as the model's template writes it."""
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
    """The number of components that vectors keep, the first ones, with length 1 again: for models that
    are made for it."""
    prompt_name: str | None = None
    """Sentence Transformers': the instruction before each text, of the model's `defaults.prompts`."""
    input_type: str | None = None
    """Cohere's: the same. A name that the model does not have is ignored."""


class ClassifyRequest(TextsRequest):
    """POST /v1/classify, as vLLM has it."""

    use_activation: bool = True
    """Whether the answer has probabilities, and not the classifier's own outputs."""


def _wrong_input() -> InvalidRequestError:
    return InvalidRequestError(
        f"'input' must be a text, a list of token ids, a text with pictures, or a list of up to "
        f"{MAX_TEXTS} of these; none may be empty.",
        "input",
    )


class TeiEmbedRequest(CutRequest):
    """POST /embed, as text-embeddings-inference has it."""

    inputs: Text | Annotated[list[Text], _Batch]
    normalize: bool = True
    """Whether vectors have a length of 1."""
    truncation_side: _Side = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    """The instruction before each text, of the model's `defaults.prompts`."""


class CohereEmbedRequest(ModelledRequest):
    """POST /v2/embed."""

    texts: list[Text] | None = None
    images: list[str] | None = None
    """Pictures as data URLs."""
    inputs: list[dict[str, Any]] | None = None
    """Texts and pictures side by side, as `{"content": [{"type": "text", "text": "A fox."}]}`."""
    input_type: str | None = None
    """The name of the instruction before each text, of the model's `defaults.prompts`. A name that the
    model does not have is ignored."""
    embedding_types: list[EmbeddingType] | None = None
    """The forms of the vectors; `float` by default."""
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    """The number of components that vectors keep, the first ones, with length 1 again: for models that
    are made for it."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The tokens of each text that are kept."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """The side where a text is cut that has more; `NONE` refuses it."""

    @property
    def prompts(self) -> list[str | Mixed | MediaPrompt]:
        """All texts, then pictures, then what has both. Raises InvalidRequestError for none or too many."""
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in self.images or ()]
        mixed = [{"content": [one]} for one in pictures] + (self.inputs or [])
        prompts = [*(self.texts or ()), *map(plain, mixed)]
        try:
            return several(_PROMPTS.validate_python(prompts)) if prompts else []
        except ValidationError:
            raise InvalidRequestError("An input has no 'content' that is read.", "inputs") from None

    @property
    def cut(self) -> TextCut | None:
        """How texts are cut; None if they are not."""
        sides: dict[str, TextCut] = {
            "START": TextCut(self.max_tokens, "left"),
            "END": TextCut(self.max_tokens, "right"),
        }
        return sides.get(self.truncate)


_PROMPTS: TypeAdapter[Prompt] = TypeAdapter(Prompt)


class Document(RequestModel):
    """A document that is an object, as Cohere's and Jina's clients may send it."""

    text: str


RankingForm = Literal["llama-server", "tei", "sglang", "cohere"]
"""The form of an answer to a ranking. SGLang's routers send a `rid`, and take a list of scores."""


class RerankRequest(CutRequest):
    """POST /v1/rerank."""

    INERT: ClassVar[frozenset[str]] = frozenset({"rid", "user"})

    query: Text
    documents: Annotated[list[str | Document], _Batch] = Field(
        validation_alias=AliasChoices("documents", "texts")
    )
    """The texts to rank. By the name `texts`, the answer is a list, as from text-embeddings-inference."""
    top_n: Annotated[int | None, Field(ge=1)] = Field(
        default=None, validation_alias=AliasChoices("top_n", "top_k")
    )
    """How many of the most relevant to give; all by default. SGLang's routers name it `top_k`."""
    return_documents: bool = Field(
        default=False, validation_alias=AliasChoices("return_documents", "return_text")
    )
    """Whether the answer repeats the texts."""
    raw_scores: bool | None = None
    """text-embeddings-inference's: whether scores are the model's own, and not between 0 and 1 by the
    logistic function. In its form they are not by default, and in others they are."""
    truncation_side: _Side = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Cohere's: the tokens of each document that are kept."""
    _form: RankingForm = PrivateAttr(default="llama-server")

    @model_validator(mode="wrap")
    @classmethod
    def _note_form(cls, data: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made = make(data)
        forms: dict[str, RankingForm] = {"texts": "tei", "rid": "sglang"}
        if isinstance(data, dict):
            made._form = next((forms[field] for field in forms if field in data), made._form)
        return made

    @property
    def form(self) -> RankingForm:
        return self._form

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def is_logistic(self) -> bool:
        """Whether scores are between 0 and 1."""
        return self.form == "tei" if self.raw_scores is None else not self.raw_scores


class CohereRerankRequest(RerankRequest):
    """POST /v2/rerank. Cohere cuts all that is too long, and its scores are between 0 and 1."""

    truncate: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = 4096
    raw_scores: bool | None = False

    @property
    def form(self) -> RankingForm:
        return "cohere"


_Texts = str | Annotated[list[str], _Batch]


class ScoreRequest(CutRequest):
    """POST /v1/score, as vLLM has it: a query for all documents, or a query for each."""

    queries: _Texts = Field(validation_alias=AliasChoices("queries", "text_1"))
    documents: _Texts = Field(validation_alias=AliasChoices("documents", "text_2"))
    use_activation: bool = True
    """Whether scores are between 0 and 1, by the logistic function."""

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
    model = find(models, request.model, ("embeddings",))
    check(model)
    _check_dimensions(model, request.dimensions)
    prompt = _prompt(model, request.prompt_name, request.input_type)
    return replace(
        _texts_to_embed(model, request, prompt),
        dimensions=request.dimensions,
        as_base64=request.encoding_format == "base64",
        norm=request.embd_normalize,
    )


def _check_dimensions(model: ModelInfo, dimensions: int | None) -> None:
    n_embd = model.tokenizer.model.n_embd
    if dimensions is not None and dimensions > n_embd:
        message = f"dimensions: this model's embeddings have {n_embd}."
        raise InvalidRequestError(message, "dimensions")


def _texts_to_embed(model: ModelInfo, request: TextsRequest, instruction: str = "") -> TextsToEmbed:
    """The request's texts, or its chat. Raises CorralError."""
    if request.messages is None:
        texts = to_embed(model, request.texts, "input", instruction, cut=request.cut)
    else:
        chat = ChatCompletionRequest(
            messages=request.messages, add_generation_prompt=False, continue_final_message=False
        )
        tokens, media = chat_with_media(model, chat, "messages")
        cut = None if media else request.cut
        texts = TextsToEmbed(model.id, check_texts(model, [tokens], "messages", cut=cut), media)
    return replace(texts, user=request.user)


def classify(models: Models, request: ClassifyRequest) -> TextsToEmbed:
    """POST /v1/classify. Raises CorralError."""
    model = find(models, request.model, ("classify",))
    _check_has_classifier(model, "classify", "classification")
    norm = 2 if request.use_activation else -1
    return replace(_texts_to_embed(model, request), norm=norm)


def tei_embed(models: Models, request: TeiEmbedRequest) -> TextsToEmbed:
    """POST /embed. Raises CorralError."""
    model = find(models, request.model, ("embeddings",))
    check_makes_embeddings(model)
    _check_dimensions(model, request.dimensions)
    inputs = [request.inputs] if isinstance(request.inputs, str) else [*request.inputs]
    prompt = _prompt(model, request.prompt_name)
    made = to_embed(model, inputs, "inputs", prompt, cut=request.cut)
    return replace(made, norm=2 if request.normalize else -1, dimensions=request.dimensions)


def cohere_embed(models: Models, request: CohereEmbedRequest) -> TextsToEmbed:
    """POST /v2/embed. Raises CorralError."""
    model, prompts = find(models, request.model, ("embeddings",)), request.prompts
    check_makes_embeddings(model)
    _check_dimensions(model, request.output_dimension)
    if not 0 < len(prompts) <= MAX_TEXTS:
        raise InvalidRequestError(f"Send 1 to {MAX_TEXTS} texts, images or inputs.", "texts")
    instruction = _prompt(model, None, request.input_type)
    made = to_embed(model, prompts, "texts", instruction, cut=request.cut)
    types = tuple(dict.fromkeys(request.embedding_types or ["float"]))
    sent = tuple(request.texts or ())
    return replace(made, dimensions=request.output_dimension, types=types, sent=sent)


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
    form: RankingForm = "llama-server"
    documents: tuple[str, ...] | None = None
    """The texts that the answer repeats, if it does."""
    is_logistic: bool = False
    """Whether scores become numbers between 0 and 1."""


def rerank(models: Models, request: RerankRequest) -> PairsToRank:
    """POST /v1/rerank. Raises CorralError."""
    model, given = find(models, request.model, ("rerank",)), request.texts
    kept = [_first_tokens(model, text, request.max_tokens_per_doc) for text in given]
    texts = _tokenize_pairs(model, request, [(request.query, text) for text in kept])
    return PairsToRank(
        model.id,
        texts,
        request.top_n,
        request.form,
        tuple(given) if request.return_documents else None,
        request.is_logistic and not model.tokenizer.model.has_softmax,
    )


def cohere_rerank(models: Models, request: CohereRerankRequest) -> PairsToRank:
    """POST /v2/rerank. Raises CorralError."""
    return rerank(models, request)


def _first_tokens(model: ModelInfo, text: str, n_most: int | None) -> str:
    """The text, or its first so many tokens."""
    if n_most is None or len(text.encode()) <= n_most:
        return text
    refuse_huge("documents", len(text))
    with more_memory(CHAR_BYTES * len(text)):
        tokens = model.tokenizer.tokenize(text, False, False)
    return text if len(tokens) <= n_most else model.tokenizer.decode(tokens[:n_most])


def score(models: Models, request: ScoreRequest) -> PairsToRank:
    """POST /v1/score. Raises CorralError."""
    model = find(models, request.model, ("rerank",))
    texts = _tokenize_pairs(model, request, request.pairs)
    is_logistic = request.use_activation and not model.tokenizer.model.has_softmax
    return PairsToRank(model.id, texts, is_logistic=is_logistic)


def _tokenize_pairs(
    model: ModelInfo, request: RerankRequest | ScoreRequest, pairs: Sequence[tuple[str, str]]
) -> Texts:
    """The tokens of each pair. Texts are cut before the model's template has them, which ends with what the
    score is read from. Raises CorralError."""
    _check_has_classifier(model, "rank", "reranking")
    if not model.tokenizer.reranks:
        labels = model.tokenizer.labels
        raise NotSupportedError(
            f"The model {model.id!r} cannot rank. Its classifier has {len(labels)} outputs, and none of "
            f"them says how relevant a text is: {', '.join(labels[:5])}. Use /v1/classify.",
            "model",
        )
    cut, encode = request.cut, model.tokenizer.encode_pair
    most, keep = (model.n_ctx_slot, keep_first) if cut is None else (cut.most(model), cut.keep)
    encoded = []
    for pair in pairs:
        n_chars = sum(map(len, pair))
        refuse_huge("documents", n_chars)
        with more_memory(CHAR_BYTES * n_chars):
            encoded.append(encode(*pair, None if cut is None else most, keep))
    if (longest := max(map(len, encoded))) > most:
        raise TextTooLongError(longest, most, "documents")
    return check_texts(model, encoded, "documents")


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


def cohere_answer(models: Models, body: bytes) -> bytes:
    """The answer to POST /v2/embed, as JSON. The body is of `ComputedVectors.pieces`."""
    result, vectors = ComputedVectors.of(body)
    unit = normalize(vectors, 2)
    embeddings = {kind: _TYPES[kind](unit) for kind in result.types}
    return encode_json(
        {
            "id": str(uuid.uuid4()),
            "embeddings": embeddings,
            "texts": result.sent,
            "response_type": "embeddings_by_type",
            "meta": cohere_meta(input_tokens=result.n_tokens),
        }
    )


def cohere_meta(**billed: int) -> dict[str, Any]:
    """Cohere's `meta`, with what would be billed."""
    return {"api_version": {"version": "2"}, "billed_units": billed}


def _as_bits(unit: Vectors) -> NDArray[np.uint8]:
    return np.packbits(unit > 0, axis=1)


_TYPES: dict[str, Callable[[Vectors], Any]] = {
    "float": lambda unit: unit,
    "int8": lambda unit: np.rint(unit * _INT8_MAX).astype(np.int8).tolist(),
    "uint8": lambda unit: (np.rint(unit * _INT8_MAX) + _INT8_MAX).astype(np.uint8).tolist(),
    "binary": lambda unit: (_as_bits(unit).astype(np.int16) - 128).tolist(),
    "ubinary": lambda unit: _as_bits(unit).tolist(),
    "base64": lambda unit: [in_base64(vector) for vector in unit],
}
"""The forms of Cohere's answer. Bytes are numbers times 127; bits tell which numbers are above 0."""


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


def describe_as_tei(model: ModelInfo) -> dict[str, Any]:
    """GET /info. Source: text-embeddings-inference, router/src/lib.rs, `Info`."""
    tokenizer = model.tokenizer
    names = dict(enumerate(tokenizer.labels or ("LABEL_0",)))
    labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    kind: dict[str, Any] = {"embedding": {"pooling": tokenizer.pooling}}
    if tokenizer.has_classifier:
        kind = {"reranker" if tokenizer.reranks else "classifier": labels}
    return {
        "model_id": model.id,
        "model_sha": None,
        "model_dtype": tokenizer.model.file_type,
        "model_type": kind,
        "max_concurrent_requests": MAX_TEXTS,
        "max_input_length": model.n_ctx_slot,
        "max_batch_tokens": MAX_TOKENS,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": __version__,
    }


def usage_json(n_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def in_base64(vector: Vectors) -> str:
    """The vector as OpenAI's clients read it: little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
