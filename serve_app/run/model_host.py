"""The part of an ingress's ModelHost that does not depend on where engines run."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import AppConfig, with_models
from serve_app.run.resolving import resolve
from serve_app.store.shared_entries import Entry

_SHARED: dict[str, Any] = dict.fromkeys(
    ("source", "projector", "adapters", "defaults", "engine"), True
) | {"serve": {"health_check_period_s", "health_check_timeout_s"}}
"""The parts of a model's entry that a copy of it has, too."""


class ConfiguredHost:
    """The models of a configuration, and the entries of those that were added. Used in one event loop."""

    def __init__(self, app: AppConfig, models: list[ResolvedModel]) -> None:
        self.app, self.configured_models = app, models
        self.entries: dict[str, Entry] = {}
        """The entries of the models that were added."""

    def entry(self, model_id: str) -> Entry | None:
        for model in self.app.models:
            if model.id == model_id:
                return model.model_dump(mode="json", exclude_unset=True, include=_SHARED)
        return None

    async def resolve(self, entry: Entry) -> ResolvedModel:
        others = [other for other in self.entries.values() if other["id"] != entry["id"]]
        app = with_models(self.app, [*others, entry])
        (model,) = await asyncio.to_thread(resolve, app, n_resolved=len(app.models) - 1)
        return model
