"""The sampling parameters as fields of requests: made from their declarations, and read by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import GenericAlias
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, create_model

from serve_app.base.sampling import PARAMETERS, Api, Parameter, SamplingParams

Model = TypeVar("Model", bound=BaseModel)


def takes_sampling(api: Api) -> Callable[[type[Model]], type[Model]]:
    """Give a request a field for each parameter that this API has. They may be missing, or null.

    The decorated class becomes a subclass of the same name: pydantic adds no fields to a class that
    is made.
    """

    def extend(model: type[Model]) -> type[Model]:
        fields: dict[str, Any] = {
            one.name_in(api): _field(one, api) for one in PARAMETERS if api in one.apis
        }
        return create_model(
            model.__name__,
            __base__=model,
            __module__=model.__module__,
            __doc__=model.__doc__,
            **fields,
        )

    return extend


def _field(parameter: Parameter, api: Api) -> tuple[Any, Any]:
    """A parameter's type and bounds. Only switches have their defaults there, and cannot be null."""
    if parameter.type is bool:
        return bool, Field(default=parameter.default, description=parameter.meaning)
    bounds = parameter.apis[api].bounds
    found = dataclasses.asdict(bounds) if bounds else {}
    limits: dict[str, Any] = {name: limit for name, limit in found.items() if limit is not None}
    if parameter.type is float:
        limits["allow_inf_nan"] = False
    said = Field(default=None, description=parameter.meaning, **limits)
    return _in_json(parameter.type) | None, said


def _in_json(type_hint: Any) -> Any:
    """The type that requests have for it: lists for tuples."""
    if get_origin(type_hint) is tuple:
        return GenericAlias(list, get_args(type_hint)[:1])
    return type_hint


def read_params(request: BaseModel, api: Api) -> dict[str, Any]:
    """The parameters that the request gives, by their own names, with the engine's values."""
    return {
        parameter.name: tuple(value)
        if isinstance(value, list)
        else parameter.synonyms.get(value, value)
        for parameter in PARAMETERS
        if api in parameter.apis
        and (value := getattr(request, parameter.name_in(api))) is not None
        and (parameter.type is not bool or parameter.name_in(api) in request.model_fields_set)
    }


def write_params(sampling: SamplingParams, api: Api) -> dict[str, Any]:
    """The values that a request is generated with, under the API's names, as JSON has them."""
    return {
        parameter.name_in(api): list(value) if isinstance(value, tuple) else value
        for parameter in PARAMETERS
        if api in parameter.apis
        for value in (getattr(sampling, parameter.name),)
    }
