"""The base of all request types: each field is honoured, ignored and told, or refused by its name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self, TypeVar, cast, get_args, get_type_hints

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from serve_app.base.errors import FieldRefusedError, InvalidRequestError
from serve_app.prompt.conversation import texts_in


def describe_extra_fields(schema: dict[str, Any], model: type[Any]) -> None:
    """The JSON schema of extra fields: those that have a meaning in the API."""
    taken = schema.setdefault("properties", {})
    for name, values in model.NEUTRAL.items():
        otherwise = "refused" if name in model.REFUSED else "ignored"
        taken.setdefault(
            name, {"examples": list(values), "description": f"At other values, {otherwise}."}
        )
    for name in sorted(model.INERT):
        taken.setdefault(name, {"description": "Changes nothing."})


@functools.cache
def _never_null(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if not field.is_required() and type(None) not in get_args(field.annotation)
    )


class RequestModel(BaseModel):
    """A request, or a part of one.

    A field that Corral does not have is ignored, and the answer names it (see `ignored_fields`). One that
    the client must not lose without a word is refused, unless its value asks for what happens anyway.
    """

    model_config = ConfigDict(
        extra="allow", use_attribute_docstrings=True, json_schema_extra=describe_extra_fields
    )

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that ask for what happens anyway at these values."""
    REFUSED: ClassVar[frozenset[str]] = frozenset()
    """Fields of NEUTRAL that are refused at other values."""
    FALLBACKS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The details of the errors of some of REFUSED, by which clients do without the field."""
    INERT: ClassVar[frozenset[str]] = frozenset()
    """Fields that ask for nothing that the answer would show, whatever they are."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_missing(cls, data: Any) -> Any:
        """Clients send null for what they leave open, also where null is no value."""
        if not isinstance(data, dict):
            return data
        nulls = {name for name in _never_null(cls) if data.get(name, ...) is None}
        return {name: value for name, value in data.items() if name not in nulls} if nulls else data

    @model_validator(mode="after")
    def _refuse_what_must_not_be_lost(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in self.REFUSED and value not in self.NEUTRAL[name]:
                accepted = " or ".join(json.dumps(neutral) for neutral in self.NEUTRAL[name])
                message = f"{name!r} is not supported, except as {accepted}."
                if name in self.FALLBACKS:
                    raise FieldRefusedError(message, name, self.FALLBACKS[name])
                raise InvalidRequestError(message, name)
        return self


class ModelledRequest(RequestModel):
    """A request to a model."""

    model: str | None = None
    """A name from /v1/models; the first of them if it is missing."""


class Foreign(BaseModel):
    """A part or an item of a kind that Corral does not know. Its texts are kept, and the answer names it
    among the ignored fields."""

    model_config = ConfigDict(extra="allow")

    type: str = "unknown"

    @property
    def text(self) -> str:
        """The texts that it carries, as lines."""
        return "\n".join(texts_in(self.model_extra))


def known_kind(*kinds: str) -> Callable[[Any], str]:
    """A discriminator by `type`: one of these kinds, or `foreign`."""

    def kind_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return kind if isinstance(kind, str) and kind in kinds else "foreign"

    return kind_of


class AnyMember:
    """The annotation of a union with Foreign, for its JSON schema: more than one member may match."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        described = handler(schema)
        described["anyOf"] = described.pop("oneOf")
        return described


def _remove_extra(request: object, path: str) -> Iterator[str]:
    """Remove the extra fields of a request and its parts, and tell those that had a meaning."""
    if isinstance(request, list):
        if request and isinstance(request[0], BaseModel):
            for one in request:
                yield from _remove_extra(one, path)
    elif isinstance(request, Foreign):
        yield f"{path}{request.type}"
    elif isinstance(request, BaseModel):
        if isinstance(request, RequestModel) and (extra := request.model_extra):
            for name, value in extra.items():
                if name not in request.INERT and value not in request.NEUTRAL.get(name, ()):
                    yield f"{path}{name}"
            extra.clear()
        for name in type(request).model_fields:
            yield from _remove_extra(getattr(request, name), f"{path}{name}.")


_ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)


@contextmanager
def ignored_fields() -> Iterator[list[str]]:
    """The fields, as `messages.weight`, that `ignore` has removed within this block. Each once."""
    names: list[str] = []
    token = _ignored.set(names)
    try:
        yield names
    finally:
        _ignored.reset(token)


def ignore(request: object) -> None:
    """Remove from a request, or a list of such, what Corral does not have, so that nothing reads it."""
    name_ignored([*_remove_extra(request, "")])


def name_ignored(names: Iterable[str]) -> None:
    """Have the answer name these parts of the request, which change nothing."""
    ignored = _ignored.get()
    if ignored is not None:
        ignored += (name for name in dict.fromkeys(names) if name not in ignored)


MAX_DEPTH = 100
"""Deepest nesting of lists and objects."""
MAX_CONTAINERS = 250_000
"""Most lists and objects. An empty one takes two bytes of a body and a hundred of memory."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def loads(text: str) -> Any:
    """The value, by the standard: no NaN, and no half of a surrogate pair. Raises ValueError."""
    if (
        _n_containers(text) > MAX_CONTAINERS
        and _n_containers(_STRING.sub("", text)) > MAX_CONTAINERS
    ):
        raise ValueError(f"More than {MAX_CONTAINERS} lists and objects")
    try:
        value = msgspec.json.decode(text)
        is_deep = _n_containers(text) > MAX_DEPTH and depth(value) > MAX_DEPTH
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"Nested deeper than {MAX_DEPTH} levels")
    return value


def depth(value: object) -> int:
    """The levels of lists and objects, counted without recursion: callers send what they like."""
    level, levels = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, Mapping | list)
        for inner in (outer.values() if isinstance(outer, Mapping) else outer)
    ]:
        levels += 1
    return levels


def _n_containers(text: str) -> int:
    return text.count("[") + text.count("{")


M = TypeVar("M")


def parse_body(kind: type[M], body: bytes) -> M:
    """The body as a request of this kind, a pydantic model or a list of such. Raises InvalidRequestError,
    also of the model's own.

    Fields that Corral does not have are removed: see request_model.
    """
    if not body:
        raise InvalidRequestError("Field required: the body is empty.")
    try:
        value = loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _unreadable("Not UTF-8") from None
    except ValueError as error:
        raise _unreadable(str(error)) from None
    try:
        request: M = _adapter(cast(Hashable, kind)).validate_python(value)
        ignore(request)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise invalid(problem["loc"], problem["msg"]) from None
    return request


@functools.cache
def body_type(work: Callable[..., Any]) -> Any:
    """The type of the body that a work is done on, its second argument: `bytes` for a body as it came."""
    return list(get_type_hints(work, include_extras=True).values())[1]


def body_for(work: Callable[..., Any], body: bytes) -> Any:
    """The body as the work wants it. Raises InvalidRequestError."""
    kind = body_type(work)
    return body if kind is bytes else parse_body(kind, body)


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter[Any](cast(Any, kind))


def _unreadable(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body cannot be read as JSON: {why}.")


def invalid(place: Sequence[int | str], message: str) -> InvalidRequestError:
    """The error for clients that pydantic found at this place of a request."""
    path = ".".join(str(part) for part in place if _names_a_field(part))
    where = f"{path}: " if path else ""
    return InvalidRequestError(f"{where}{message}", path or None)


def _names_a_field(part: int | str) -> bool:
    """Pydantic also names the branch of a union that it tried: `str`, `list[constrained-int]`."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
