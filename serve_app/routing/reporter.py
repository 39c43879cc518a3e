"""A replica's reports to the routers, and, through Serve's controller, to the autoscaler."""

from __future__ import annotations

from serve_app.engine import CachedPrefixes, EngineStats
from serve_app.routing.autoscaling import PRESSURE, EngineLoad
from serve_app.routing.blocks import Inventory, request_key, turn_key
from serve_app.routing.score import Report


class Reporter:
    """Makes one replica's reports. Used in its event loop."""

    def __init__(self) -> None:
        self._inventory = Inventory()
        self._last: tuple[EngineStats, CachedPrefixes, Report] | None = None

    def report(self, stats: EngineStats, cached_prefixes: CachedPrefixes) -> Report:
        """The report; the same object for the same arguments, as an idle engine has nothing new to say."""
        last = self._last
        if last is None or last[0] is not stats or last[1] is not cached_prefixes:
            last = self._last = stats, cached_prefixes, self._made(stats, cached_prefixes)
        return last[2]

    def _made(self, stats: EngineStats, cached_prefixes: CachedPrefixes) -> Report:
        return Report(
            n_slots=stats.n_slots,
            n_live=stats.queue.running + stats.queue.waiting,
            work_s=stats.queue.backlog_s,
            prefill_s=stats.queue.prefill_backlog_s,
            prompt_token_s=stats.costs.prompt_token_s,
            token_s=stats.costs.token_s,
            answer_tokens=stats.costs.answer_tokens,
            n_background=stats.queue.background_running + stats.queue.background_waiting,
            background_s=stats.queue.background_backlog_s,
            blocks=frozenset(self._inventory.blocks(cached_prefixes.prompts)),
            requests=frozenset(request_key(one) for one in cached_prefixes.taken),
            turns=frozenset(map(turn_key, cached_prefixes.adapters)),
        )


def pressure(stats: EngineStats, *, with_background: bool = False) -> dict[str, float]:
    """The figures that `serve_app.routing.autoscaling` uses.
    Background requests count if they are to have replicas of their own."""
    behind = with_background
    n_live = stats.queue.running + stats.queue.waiting
    n_behind = stats.queue.background_running + stats.queue.background_waiting
    load = EngineLoad(
        backlog_s=stats.queue.backlog_s + behind * stats.queue.background_backlog_s,
        slots=(n_live + behind * n_behind) / stats.n_slots,
        cells=sum(
            slot.n_past
            for slot in stats.slots
            if slot.request_id is not None and (behind or not slot.background)
        )
        / stats.n_ctx,
    )
    return {PRESSURE: load.pressure}
