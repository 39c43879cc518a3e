"""`options` of Ollama's requests.

Source: ollama, api/types.go, `Options`, and docs/modelfile.mdx, "Valid Parameters and Values".
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from serve_app.ingress.generation.sampling_fields import given, takes_sampling
from serve_app.ingress.ollama.messages import OllamaModel
from serve_app.sampling import Api

_INT_MAX = 2**31 - 1


@takes_sampling(Api.OPENAI)
class Options(OllamaModel):
    """The sampling parameters, which have the same names at Ollama, and these. Those that say how a model
    is loaded (`num_ctx`, `num_gpu`, `num_thread` and others) are ignored: the configuration says that."""

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
        """Those that are given, by the names of OpenAI's requests. A `seed` of -1 is none."""
        found = given(self, Api.OPENAI)
        if found.get("seed") == -1:
            del found["seed"]
        return found
