"""Durations in the configuration: seconds, or a text such as `1h30m`, as Ollama writes them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_PART = r"(\d+(?:\.\d+)?)([smh])"


def seconds(value: object) -> object:
    """The seconds that the text stands for; any other value as it is. Raises ValueError for another
    text."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(f"(?:{_PART})+", value):
        raise ValueError("give seconds, or a text such as 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, value))


KeepAlive = Annotated[float, Field(gt=0, le=10**7), BeforeValidator(seconds)]
