"""The base of all request types: each field is honoured, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from serve_app.errors import InvalidRequestError


def name_what_is_taken(schema: dict[str, Any], model: type[Any]) -> None:
    """The JSON schema of extra fields: those that are honoured, and no others."""
    taken = schema.setdefault("properties", {})
    for name, values in model.NEUTRAL.items():
        taken.setdefault(name, {"enum": list(values), "description": "At other values, refused."})
    for name in sorted(model.INERT):
        taken.setdefault(name, {"description": "Changes nothing."})
    schema["additionalProperties"] = False


class StrictModel(BaseModel):
    """A request, or a part of one.

    A field that its API documents and Corral cannot honour is refused unless its value asks for what
    happens anyway (`n: 1`); one that nobody documents is refused always.
    """

    model_config = ConfigDict(
        extra="allow", use_attribute_docstrings=True, json_schema_extra=name_what_is_taken
    )

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
