"""Requests that are honoured or refused, field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from serve_app.errors import InvalidRequestError


class StrictModel(BaseModel):
    """A request, or a part of one.

    A field that its API documents and Corral cannot honour is refused unless its value asks for what
    happens anyway (`n: 1`); one that nobody documents is refused always.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that change nothing at these values."""
    INERT: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing, whatever they are."""

    @model_validator(mode="after")
    def _refuse_what_cannot_be_honoured(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in self.INERT:
                continue
            if name not in self.NEUTRAL:
                raise InvalidRequestError(f"Unknown parameter: {name!r}.", name)
            if value not in self.NEUTRAL[name]:
                accepted = " or ".join(json.dumps(neutral) for neutral in self.NEUTRAL[name])
                raise InvalidRequestError(f"{name!r} is not supported, except as {accepted}.", name)
        return self
