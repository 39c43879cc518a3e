"""`options` of Ollama's requests.

Source: ollama, api/types.go, `Options`, and docs/modelfile.mdx, "Valid Parameters and Values".
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from serve_app.ingress.generation.sampling_fields import given, takes_sampling
from serve_app.ingress.http.request_model import RequestModel
from serve_app.sampling import Api

_INT_MAX = 2**31 - 1


@takes_sampling(Api.OPENAI)
class Options(RequestModel):
    """The sampling parameters, which have the same names at Ollama, and these. Those that say how a model
    is loaded are ignored: the configuration says that. `num_ctx`, which an answer may show, is named."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_gpu",
            "num_gqa",
            "num_thread",
            "numa",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        }
    )

    num_predict: Annotated[int, Field(ge=-2, le=_INT_MAX)] | None = None
    """Most tokens to generate; 0 and less for all that the context has room for."""
    num_keep: Annotated[int, Field(ge=-1, le=_INT_MAX)] | None = None
    """First tokens of the prompt that stay when it is cut or the context is shifted; -1 for all."""

    @field_validator("stop", mode="before", check_fields=False)
    @classmethod
    def _several_and_not_empty(cls, value: object) -> object:
        texts = [value] if isinstance(value, str) else value
        return [text for text in texts if text != ""] if isinstance(texts, list) else texts

    @property
    def max_tokens(self) -> int | None:
        """None means up to the end of the context."""
        most = self.num_predict
        return most if most is not None and most > 0 else None

    def sampling(self) -> dict[str, Any]:
        """The request's parameters, by the names of OpenAI's requests. A `seed` of -1 is none."""
        parameters = given(self, Api.OPENAI)
        if parameters.get("seed") == -1:
            del parameters["seed"]
        return parameters
