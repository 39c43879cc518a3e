"""Context shifts: which tokens a full context keeps. Pure."""

from __future__ import annotations

from serve_app.engine.options import EngineOptions
from serve_app.types import GenerationRequest

# Contexts shorter than this end when they are full, whatever was asked for: there is nothing to drop.
_LEAST_CTX = 8


def n_kept(request: GenerationRequest, options: EngineOptions) -> int | None:
    """First tokens that stay; None if the request ends instead. It goes on only up to its `max_tokens`, or
    it might never end."""
    asked = request.context_shift
    wanted = options.context_shift if asked is None else asked
    if not wanted or request.sampling.max_tokens is None or options.n_ctx_slot < _LEAST_CTX:
        return None
    if request.media:  # half of one is none
        return None
    n_keep = options.n_keep if request.n_keep is None else request.n_keep
    n_keep = len(request.prompt) if n_keep < 0 else n_keep
    return max(1, min(n_keep, options.n_ctx_slot - _LEAST_CTX // 2))


def n_dropped(request: GenerationRequest, n_ctx_slot: int, n_keep: int) -> int:
    """Tokens behind the first `n_keep` that go: as many as the request says, or half of them, the newest
    one not counted."""
    return min(request.n_discard, n_ctx_slot - n_keep - 1) or (n_ctx_slot - n_keep) // 2
