"""What a new deploy leaves running."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.app import build, fingerprint
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.run.resolving import resolve

ENGINE = {"n_slots": 1, "n_ctx_slot": 256, "threads": 1}


def entry(**fields: Any) -> dict[str, Any]:
    return {"id": "m", "source": {"builtin": True}, "engine": ENGINE} | fields


def resolved(*entries: dict[str, Any]) -> list[ResolvedModel]:
    return resolve(schema.parse({"models": list(entries)}))


def deployments(*entries: dict[str, Any]) -> dict[str, str | None]:
    """By their names, the versions that Serve compares, after it has set its own."""
    found = {}
    ingress: Any = build({"models": list(entries)})._bound_deployment
    for app in ingress.init_args[1]:
        config = app._bound_deployment._deployment_config
        config.version = "Serve's own"
        found[app._bound_deployment.name] = config.version
    return found


def test_a_model_is_added_and_taken_away_without_a_change_of_the_others() -> None:
    alone = deployments(entry(aliases=["chat"]))
    both = deployments(entry(), entry(id="new", aliases=["chat"], tags=["canary"]))
    assert list(both) == ["engine-m", "engine-new"]
    assert both["engine-m"] == alone["engine-m"] != "Serve's own"
    assert deployments(entry(id="new")) == {"engine-new": both["engine-new"]}


@pytest.mark.parametrize(
    "change", [{"engine": ENGINE | {"n_slots": 2}}, {"defaults": {"max_tokens": 5}}], ids=str
)
def test_engines_are_replaced_if_they_change(change: dict[str, Any]) -> None:
    assert deployments(entry())["engine-m"] != deployments(entry(**change))["engine-m"]


def test_free_memory_at_the_moment_of_a_deploy_replaces_nothing() -> None:
    (model,) = resolved(entry())
    later = replace(model, options=replace(model.options, cache_ram_bytes=1), sizing="other")
    assert fingerprint(later) == fingerprint(model)
    (said,) = resolved(entry(engine=ENGINE | {"cache_ram_mib": 8}))
    (other,) = resolved(entry(engine=ENGINE | {"cache_ram_mib": 9}))
    assert fingerprint(said) != fingerprint(other)
