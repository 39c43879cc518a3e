"""Writes pydantic's validation errors in one line."""

from __future__ import annotations

from pydantic import ValidationError


def describe(error: ValidationError, whole: str = "") -> str:
    """Every field that is wrong and why, without its value, which may be a secret. `whole` stands for no
    field in particular."""
    found = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(str(part) for part in one['loc']) or whole}: {one['msg']}" for one in found
    )
