"""What pydantic found wrong with a file, in one line."""

from __future__ import annotations

from pydantic import ValidationError


def told(error: ValidationError, whole: str = "") -> str:
    """Every field at fault and why, without what it was: that may be a secret. `whole` stands for no field
    in particular."""
    faults = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(str(part) for part in fault['loc']) or whole}: {fault['msg']}"
        for fault in faults
    )
