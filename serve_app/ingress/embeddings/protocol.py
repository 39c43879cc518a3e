"""The types of requests for embeddings and rankings.

Sources: OpenAI's API reference, "Embeddings"; llama.cpp, tools/server/README.md; Jina's reranker API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

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

from serve_app.errors import InvalidRequestError
from serve_app.ingress.generation.requests import Text, TokenId
from serve_app.ingress.http.request_model import RequestModel
from serve_app.ingress.llama_server.protocol import Mixed, plain, several

MAX_TEXTS = 2048
"""Texts in one request, as at OpenAI."""
_Batch = Field(min_length=1, max_length=MAX_TEXTS)


class EmbeddingsRequest(RequestModel):
    """POST /v1/embeddings."""

    input: str | Annotated[list[Mixed | str | TokenId], Field(min_length=1)]
    """A text, or token ids and texts mixed; or several of either."""
    model: str | None = None
    """A name from /v1/models; the first of them if it is missing."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or base64 of little-endian 32-bit floats."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many numbers, of length 1 again: for models that are made for it."""
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
    def _check_texts(self) -> EmbeddingsRequest:
        if [] in self.texts or len(self.texts) > MAX_TEXTS:
            raise _wrong_input()
        return self

    @property
    def texts(self) -> list[str | list[int | str]]:
        """One or several."""
        return several(self.input)


def _wrong_input() -> InvalidRequestError:
    return InvalidRequestError(
        f"'input' must be a text, a list of token ids, or a list of up to {MAX_TEXTS} of either; none may "
        "be empty.",
        "input",
    )


class LlamaEmbeddingRequest(RequestModel):
    """POST /embedding, llama-server's."""

    content: Annotated[
        str | list[Mixed | str | TokenId],
        Field(validation_alias=AliasChoices("content", "input")),
    ]
    """A text, or token ids and texts mixed; or several of either."""
    embd_normalize: Annotated[int, Field(ge=-1, le=100)] = 2
    """-1 for no normalisation; 0 for the largest number as 32760, 2 for length 1, others for p-norms."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, whatever is asked for."""
    model: str | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> LlamaEmbeddingRequest:
        if not self.texts or [] in self.texts:
            raise InvalidRequestError("A text is empty.", "content")
        if len(self.texts) > MAX_TEXTS:
            raise InvalidRequestError(f"More than {MAX_TEXTS} texts are given.", "content")
        return self

    @property
    def texts(self) -> list[str | list[int | str]]:
        """One or several."""
        return several(self.content)


class RerankRequest(RequestModel):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text], _Batch] = Field(
        validation_alias=AliasChoices("documents", "texts")
    )
    """The texts to rank. By the name `texts`, the answer is a list, as from text-embeddings-inference."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """How many of the most relevant to give; all by default."""
    model: str | None = None
    _is_tei: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _note_form(cls, data: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made = make(data)
        made._is_tei = isinstance(data, dict) and "texts" in data
        return made

    @property
    def is_tei(self) -> bool:
        """Whether the answer is a list."""
        return self._is_tei
