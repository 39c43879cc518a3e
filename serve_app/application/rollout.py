"""A deploy beside what runs: versions of a model, and deployments that have not changed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from serve_app import __version__
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import DEFAULT_VERSION, ModelConfig
from serve_app.errors import ConfigError
from serve_app.types import Version

_ALL_WEIGHT = 100.0


def engine_id(model: ModelConfig) -> str:
    """The id of a model's engines. It stays as it is when other versions come and go."""
    return model.id if model.version is None else f"{model.id}@{model.version}"


def versions(models: Sequence[ModelConfig]) -> dict[str, Version]:
    """The versions, by the ids of their engines; nothing for models that are alone under a name and give
    none. The first one of a name gets all requests unless weights are given."""
    n_of_name = Counter(model.id for model in models)
    found: dict[str, Version] = {}
    seen: set[str] = set()
    for model in models:
        if n_of_name[model.id] > 1 or model.version is not None:
            usual = 0.0 if model.id in seen else _ALL_WEIGHT
            weight = usual if model.weight is None else model.weight
            name = model.version or DEFAULT_VERSION
            found[engine_id(model)] = Version(model.id, name, weight)
        seen.add(model.id)
    return found


def shared_aliases(models: Sequence[ModelConfig]) -> dict[str, tuple[str, ...]]:
    """The aliases of each model name, which all its versions share."""
    of_names: dict[str, dict[str, None]] = {}
    for model in models:
        of_names.setdefault(model.id, {}).update(dict.fromkeys(model.aliases))
    return {name: tuple(aliases) for name, aliases in of_names.items()}


def check_memory(models: Sequence[ResolvedModel], total_bytes: int) -> None:
    """Raises ConfigError if a model's versions together have more weights than a machine has memory."""
    by_name: dict[str, list[ResolvedModel]] = {}
    for model in models:
        if model.version is not None:
            by_name.setdefault(model.version.model, []).append(model)
    for name, those in by_name.items():
        n_bytes = sum(one.weight_bytes for one in those if one.on_demand is None)
        if len(those) > 1 and n_bytes > total_bytes:
            named = " and ".join(one.name for one in those)
            raise ConfigError(
                f"models ({name}): {named} have {n_bytes / 2**30:.1f} GiB of weights together, and this "
                f"machine has {total_bytes / 2**30:.1f} GiB of memory. If they run on different machines, "
                "say so: set serve.ray_actor_options.num_cpus for each."
            )


def fingerprint(model: ResolvedModel) -> str:
    """A text that changes when engines must be replaced. The memory that is free at this moment does not
    count, nor what only the ingress reads."""
    shares: Mapping[str, Any] = dict.fromkeys(model.memory_shares, 0)
    options = dataclasses.replace(model.options, **shares)
    counting = dataclasses.replace(
        model, options=options, aliases=(), tags=(), sizing="", version=None, n_replicas=0
    )
    return blake2b(f"{__version__} {counting!r}".encode(), digest_size=16).hexdigest()
