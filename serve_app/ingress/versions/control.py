"""The weights of versions: what one ingress replica knows of them, and how they change while serving."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping

from serve_app import metrics
from serve_app.errors import CorralError, InvalidRequestError
from serve_app.ingress.model_registry import ServedModel, shares
from serve_app.store.shared_entries import VersionWeights
from serve_app.types import Version

logger = logging.getLogger("corral.ingress")


def changed(weights: Mapping[str, float], percents: Mapping[str, float]) -> dict[str, float]:
    """Weights in percent, of which other versions share the rest as before. Raises InvalidRequestError."""
    for name, percent in percents.items():
        if name not in weights:
            known = ", ".join(weights)
            raise InvalidRequestError(
                f"There is no version {name!r}. The versions are: {known}.", "weights"
            )
        if not 0 <= percent <= 100:
            raise InvalidRequestError("Weights are percentages, from 0 to 100.", "weights")
    rest = 100.0 - math.fsum(percents.values())
    others = {name: weight for name, weight in weights.items() if name not in percents}
    if rest < -1e-6 or (rest > 1e-6 and not others):
        raise InvalidRequestError(f"The weights add up to {100 - rest:g}, not to 100.", "weights")
    return {
        name: percents[name] if name in percents else _part(name, others, rest) for name in weights
    }


def _part(name: str, others: Mapping[str, float], rest: float) -> float:
    total = math.fsum(others.values())
    if total:
        return max(0.0, rest) * others[name] / total
    if rest > 1e-6 and len(others) > 1:
        raise InvalidRequestError(
            f"{rest:g} percent are left, and none of {' and '.join(others)} has a share now. Name the one "
            "that gets them.",
            "weights",
        )
    return max(0.0, rest)


def before_rollout(
    now: Mapping[str, float], earlier: Iterable[Mapping[str, float]]
) -> dict[str, float] | None:
    """The weights to go back to: of earlier ones, the latest first, those of a moment at which one version
    that is still there had everything, and not the one that has everything now. None if there was none."""
    for weights in earlier:
        sole = _sole(weights)
        if sole is not None and sole in now and sole != _sole(now):
            return {name: 100.0 if name == sole else 0.0 for name in now}
    return None


def _sole(weights: Mapping[str, float]) -> str | None:
    given = [name for name, weight in weights.items() if weight > 0]
    return given[0] if len(given) == 1 else None


def weights_of_ready(
    weights: Mapping[str, float], is_ready: Mapping[str, bool]
) -> dict[str, float]:
    """The weights of versions that can answer. If none can, requests wait, and all weights count."""
    ready = {name: weight if is_ready[name] else 0.0 for name, weight in weights.items()}
    return ready if any(ready.values()) else dict(weights)


class VersionControl:
    """The weights of versions, in one ingress replica. Used in its event loop."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        all_changes: VersionWeights,
        tell_ingresses: Callable[[], Awaitable[None]],
    ) -> None:
        """`models` have the configuration's weights; they are changed here."""
        self._models = models
        self._all_changes = all_changes
        self._tell_ingresses = tell_ingresses
        what = "Share of a model's requests that a version gets, from 0 to 1."
        self._share = metrics.gauge("version_share", what, ("model", "version"))
        self._configured: dict[str, dict[str, float]] = {}
        for model in models.values():
            if model.version is not None:
                of_model = self._configured.setdefault(model.version.model, {})
                of_model[model.version.name] = model.version.weight
        self._weights = {model: dict(of_model) for model, of_model in self._configured.items()}
        self._came: set[str] = set()
        self._coming: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Have the configuration count, if it has changed. Raises nothing."""
        try:
            for model, configured in self._configured.items():
                newest = await asyncio.to_thread(self._all_changes.newest, model)
                if newest is None or newest.configured != configured:
                    await asyncio.to_thread(self._all_changes.add, model, configured, configured)
        except Exception as error:
            logger.warning("The weights of versions cannot be kept: %r.", error)
        versions = (one for one in self._models.values() if one.version is not None)
        await asyncio.gather(*(one.engine.stats() for one in versions))  # who runs is known then
        await self.look()

    async def look(self) -> None:
        """Learn the weights that there are now. Raises nothing: Ray's head may be away for a moment."""
        try:
            for model, configured in self._configured.items():
                newest = await asyncio.to_thread(self._all_changes.newest, model)
                is_valid = newest is not None and newest.configured == configured
                weights = dict(newest.weights) if newest and is_valid else configured
                if weights != self._weights[model]:
                    percents = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
                    logger.info("Model %s: the weights of its versions are %s.", model, percents)
                    self._weights[model] = weights
        except Exception as error:
            logger.warning("The weights of versions are not known: %r.", error)
        present = self.given()
        for model, weights in self._weights.items():
            of_versions = shares({name: present[f"{model}@{name}"] for name in weights})
            for version, share in of_versions.items():
                self._share.set(share, {"model": model, "version": version})
        self._load_what_is_due()

    def given(self) -> dict[str, float]:
        """The weight of each version now, by full name: 0 before it can answer. The models know it, too."""
        found = {}
        for model, weights in self._weights.items():
            versions = {name: self._models[f"{model}@{name}"] for name in weights}
            ready = {name: self._is_ready(one) for name, one in versions.items()}
            for name, weight in weights_of_ready(weights, ready).items():
                full_name = f"{model}@{name}"
                version = Version(model, name, weights[name], weight)
                if versions[name].version != version:
                    self._models[full_name] = dataclasses.replace(versions[name], version=version)
                found[full_name] = weight
        return found

    def _is_ready(self, model: ServedModel) -> bool:
        is_loaded = model.engine.is_loaded
        if not model.is_on_demand:
            return is_loaded
        if is_loaded:
            self._came.add(model.id)
        return model.id in self._came  # requests load it again, as any model that is on demand

    def _load_what_is_due(self) -> None:
        """Versions on demand that have a weight and were not here yet, beside others that are loaded."""
        for family, weights in self._weights.items():
            versions = [self._models[f"{family}@{name}"] for name in weights]
            if not any(version.engine.is_loaded for version in versions):
                continue
            for model in versions:
                is_due = model.version is not None and model.version.weight > 0
                if is_due and not self._is_ready(model) and model.id not in self._coming:
                    self._coming[model.id] = asyncio.create_task(self._load(model))

    async def _load(self, model: ServedModel) -> None:
        try:
            await model.engine.load()
        except CorralError as error:
            logger.warning("%s has a weight, and is not loaded: %s", model.id, error)
        finally:
            del self._coming[model.id]

    async def change(self, model: str, percents: Mapping[str, float]) -> None:
        now = self._versions_of(model)
        await self._change(model, changed(now, percents))

    async def roll_back(self, model: str) -> None:
        now = self._versions_of(model)
        history = await asyncio.to_thread(self._all_changes.history, model)
        weights = before_rollout(now, (one.weights for one in history))
        if weights is None:
            raise InvalidRequestError(
                f"No version of {model!r} had all requests before, so there is nothing to go back to.",
                "model",
            )
        await self._change(model, weights)

    def _versions_of(self, model: str) -> dict[str, float]:
        if model not in self._weights:
            raise InvalidRequestError(f"The model {model!r} has one version only.", "model")
        return self._weights[model]

    async def _change(self, model: str, weights: dict[str, float]) -> None:
        """The history gets what was really given, too, if a version with a weight could not answer: another
        one may have had everything so."""
        given = self.given()
        before = {name: given[f"{model}@{name}"] for name in weights}
        for one in (before, weights) if before != self._weights[model] else (weights,):
            await asyncio.to_thread(self._all_changes.add, model, one, self._configured[model])
        await self.look()
        await self._tell_ingresses()
