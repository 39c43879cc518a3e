"""API keys: the entries of the key file."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Secret = Annotated[str, Field(min_length=16, pattern=r"^[!-~]+$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ApiKey(BaseModel):
    """An entry of the key file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: _Name
    """The name of the key's owner. Slots are shared fairly among names."""
    key: Annotated[_Secret | None, Field(repr=False)] = None
    """The secret, of 16 characters at least: letters, digits and signs of ASCII. `corral hash-keys` stores
    `sha256` in its place."""
    sha256: Annotated[_Sha256 | None, Field(repr=False)] = None
    """The SHA-256 of the secret, in hexadecimal. Whoever reads the file cannot use the key."""
    max_concurrent_requests: PositiveInt | None = None
    """POSTs that may run at once. Each answer of `n` is one."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers together, in any 60 seconds."""
    tokens_per_day: PositiveInt | None = None
    """Tokens of prompts and answers together, in a day (UTC)."""
    cost_per_month: PositiveFloat | None = None
    """The cost by `ingress.prices`, in a month (UTC)."""
    over_budget: Literal["refuse", "background"] = "refuse"
    """The treatment of requests beyond a budget: 429, or they run behind all other requests."""
    max_prompt_tokens: PositiveInt | None = None
    """Tokens of all prompts of a request together."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a prompt and its answer. An answer that would have more ends there."""
    models: Annotated[list[_Name], Field(max_length=1000)] | None = None
    """The models that the key may use: their ids, or patterns such as `qwen*`. An adapter is
    `MODEL:ADAPTER`. Default: all."""
    cache_group: _Name | None = None
    """Keys of one group start from each other's cached prefixes. Default: the key's own name."""
    min_priority: int = 0
    """The lowest `priority` that its requests may have. Lower values go first."""
    admin: bool = False
    """Whether the key may do what operators do, and see what others do."""
    expires: AwareDatetime | None = None
    """The time after which the key is not valid, such as `2027-01-31T00:00:00Z`. Default: never."""
    labels: Annotated[dict[_Name, Annotated[str, Field(max_length=256)]], Field(max_length=16)] = {}
    """Texts of your own, such as `team: search`."""
    created: AwareDatetime | None = None
    """The time at which the server made the key, or its secret."""

    @model_validator(mode="after")
    def _has_one_secret(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either `key` or `sha256` is needed")
        return self

    @property
    def digest(self) -> str:
        return self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()
