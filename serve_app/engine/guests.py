"""The guests of an engine, in the order in which a step calls them."""

from __future__ import annotations

from serve_app.engine.backends.adapters import AdapterTurns
from serve_app.engine.cache_mode_switcher import CacheModeSwitcher
from serve_app.engine.core.engine_core import EngineCore
from serve_app.engine.core.guest import Guest
from serve_app.engine.drafts.drafter import Drafter
from serve_app.engine.drafts.drafting import Drafting
from serve_app.engine.embedding import EmbeddingQueue
from serve_app.engine.kv_cache.manager import PrefixStorage
from serve_app.engine.pictures.encoding import Encoding


def make_guests(core: EngineCore) -> list[Guest]:
    """Make the guests that an engine's backend and options ask for. Decoder thread."""
    backend, options, costs = core.backend, core.options, core.costs
    core.scheduler.turns = AdapterTurns(options.max_stall_s)
    guests: list[Guest] = [
        CacheModeSwitcher(core),
        EmbeddingQueue(backend, costs, core.budget, core.progress, core.queue.accounts),
        PrefixStorage(core.cache),
    ]
    if backend.traits.can_rewind and (options.speculate or backend.draft is not None):
        model = backend.draft
        drafter = None if model is None else Drafter(model, options.n_slots, core.progress)
        drafting = Drafting(costs, core.budget, lookup=options.speculate, drafter=drafter)
        core.scheduler.drafts = drafting
        guests.append(drafting)
    if backend.pictures is not None:
        guests.append(
            Encoding(
                backend.pictures.projector,
                core.budget,
                options.picture_ram_bytes,
                core.counts,
                core.interlude,
            )
        )
    return guests
