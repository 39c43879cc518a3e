"""The variants: files of several formats, then ways to serve one of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.engine import EngineOptions

AS_GIVEN = "as given"
"""The format of the user's own file."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A file and how it is served."""

    format: str
    """AS_GIVEN, or llama.cpp's name of a format."""
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Differences from Corral's defaults: fields of `engine` in the configuration."""

    @property
    def name(self) -> str:
        """For tables and plots."""
        said = [f"{name}: {_text(value)}" for name, value in self.settings.items()]
        return ", ".join([self.format, *said])

    def __hash__(self) -> int:
        return hash(self.name)

    def options(self, n_slots: int, n_ctx_slot: int, threads: int) -> EngineOptions:
        """The engine that serves it: so many slots, and nothing measured at its start. `threads` if
        the variant does not say."""
        base: dict[str, Any] = {"threads": threads, "flash_attn": True, "kv_unified": False}
        return EngineOptions(
            n_slots=n_slots,
            n_ctx_slot=n_ctx_slot,
            max_stall_s=None,
            speculate=False,
            profile_limit_s=0,
            **(base | dict(self.settings)),
        )


def ways(best: Variant, n_physical: int, n_logical: int) -> list[Variant]:
    """Ways to serve the best variant's file, a setting changed at a time. Corral's defaults come first."""
    counts = sorted({n for n in (n_physical // 2, n_logical) if n > 0} - {n_physical})
    changes: list[dict[str, Any]] = [
        *({"threads": n} for n in counts),
        {"flash_attn": False},
        {"kv_unified": True},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ]
    return [best, *(Variant(best.format, best.path, change) for change in changes)]


def fastest(seconds: Mapping[Variant, float], eligible: Sequence[Variant]) -> Variant:
    """The eligible variant with the least time; the earliest of equals."""
    return min(eligible, key=lambda variant: seconds[variant])


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
