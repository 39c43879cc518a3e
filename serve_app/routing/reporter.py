"""Makes a replica's reports to the routers and the autoscaler, which go through Serve's controller."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from serve_app.engine import EngineStats, Holdings
from serve_app.routing.autoscaling import PRESSURE, Load
from serve_app.routing.blocks import Inventory, pack, request_key
from serve_app.routing.score import Report


class Reporter:
    """Makes one replica's reports. Used in its event loop."""

    def __init__(self) -> None:
        self._inventory = Inventory()

    def report(self, stats: EngineStats, holdings: Holdings) -> dict[str, Any]:
        """The fields of `Report`, all of them numbers and bytes."""
        return asdict(
            Report(
                n_slots=stats.n_slots,
                n_live=stats.running + stats.waiting,
                work_s=stats.backlog_s,
                prefill_s=stats.prefill_backlog_s,
                prompt_token_s=stats.prompt_token_s,
                token_s=stats.token_s,
                answer_tokens=stats.answer_tokens,
                blocks=pack(self._inventory.blocks(holdings.prompts)),
                requests=pack([request_key(one) for one in holdings.taken]),
            )
        )


def pressure(stats: EngineStats, n_ctx: int | None) -> dict[str, float]:
    """What `serve_app.routing.autoscaling` goes by; `n_ctx` as in the engine's options."""
    n_cells = n_ctx or stats.n_slots * stats.n_ctx_slot
    load = Load(
        backlog_s=stats.backlog_s,
        slots=(stats.running + stats.waiting) / stats.n_slots,
        cells=sum(slot.n_past for slot in stats.slots if slot.request_id is not None) / n_cells,
    )
    return {PRESSURE: load.pressure}
