"""MessagePack between Corral's processes.

Nothing is made of a message but a value of the type that its reader expects. The sender may be a process
that a client has taken over.
"""

from __future__ import annotations

import functools
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from serve_app.base.errors import CorralError, InvalidRequestError, error_of, fields_of


def _to_builtin(value: object) -> object:
    if isinstance(value, CorralError):
        return fields_of(value)
    if isinstance(value, BaseModel):
        return value.model_dump_json(by_alias=True)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _from_builtin(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, CorralError):
        return error_of(*value)
    if issubclass(kind, PurePath):
        return kind(value)
    if not issubclass(kind, BaseModel):
        raise NotImplementedError(kind.__name__)
    try:
        return kind.model_validate_json(value)
    except ValidationError:
        raise ValueError(f"This is no {kind.__name__}.") from None


_encode = msgspec.msgpack.Encoder(enc_hook=_to_builtin).encode


def encode(value: object) -> bytes:
    """The message. Raises InvalidRequestError for an integer of more than 64 bits, which a client sent."""
    try:
        return _encode(value)
    except OverflowError:
        raise InvalidRequestError("An integer has more than 64 bits.") from None


@functools.cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of messages of this type. It raises msgspec.MsgspecError for all others."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_builtin)
