"""What a new deploy leaves running."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.application import rollout
from serve_app.application.resolving import resolve
from serve_app.config import schema
from serve_app.config.resolved import OnDemandSettings, ResolvedModel
from serve_app.errors import ConfigError
from serve_app.types import Version

ENGINE = {"n_slots": 1, "n_ctx_slot": 256, "threads": 1}


def entry(**fields: Any) -> dict[str, Any]:
    return {"id": "m", "source": {"builtin": True}, "engine": ENGINE} | fields


def resolved(*entries: dict[str, Any]) -> list[ResolvedModel]:
    return resolve(schema.parse({"models": list(entries)}).models)


def deployments(*entries: dict[str, Any]) -> dict[str, str | None]:
    """By their names, the versions that Serve compares, after it has set its own."""
    found = {}
    ingress: Any = build({"models": list(entries)})._bound_deployment
    for app in ingress.init_args[1]:
        config = app._bound_deployment._deployment_config
        config.version = "Serve's own"
        found[app._bound_deployment.name] = config.version
    return found


def test_a_version_is_added_and_taken_away_without_a_change_of_the_others() -> None:
    alone = deployments(entry())
    both = deployments(entry(weight=90), entry(version="new", weight=10, tags=["canary"]))
    assert list(both) == ["engine-m", "engine-m@new"]
    assert both["engine-m"] == alone["engine-m"] != "Serve's own"
    assert deployments(entry(version="new")) == {"engine-m@new": both["engine-m@new"]}


@pytest.mark.parametrize(
    "change", [{"engine": ENGINE | {"n_slots": 2}}, {"defaults": {"max_tokens": 5}}], ids=str
)
def test_engines_are_replaced_if_they_change(change: dict[str, Any]) -> None:
    assert deployments(entry())["engine-m"] != deployments(entry(**change))["engine-m"]


def test_free_memory_at_the_moment_of_a_deploy_replaces_nothing() -> None:
    (model,) = resolved(entry())
    later = replace(model, options=replace(model.options, cache_ram_bytes=1), sizing="other")
    assert rollout.fingerprint(later) == rollout.fingerprint(model)
    (said,) = resolved(entry(engine=ENGINE | {"cache_ram_mib": 8}))
    (other,) = resolved(entry(engine=ENGINE | {"cache_ram_mib": 9}))
    assert rollout.fingerprint(said) != rollout.fingerprint(other)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry()], [("m", None)]),
        ([entry(version="v1")], [("m@v1", Version("m", "v1", 100))]),
        (
            [entry(), entry(version="new")],
            [("m", Version("m", "default", 100)), ("m@new", Version("m", "new", 0))],
        ),
        (
            [entry(version="a", weight=3), entry(version="b", weight=1), entry(id="n")],
            [("m@a", Version("m", "a", 3)), ("m@b", Version("m", "b", 1)), ("n", None)],
        ),
    ],
)
def test_versions_and_weights(
    entries: list[dict[str, Any]], expected: list[tuple[str, Version | None]]
) -> None:
    assert [(one.id, one.version) for one in resolved(*entries)] == expected


def test_other_names_are_all_versions() -> None:
    found = resolved(entry(aliases=["x"]), entry(version="new", aliases=["y", "x"]))
    assert [one.aliases for one in found] == [("x", "y"), ("x", "y")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(), entry()], "a different `version` (default, default)"),
        ([entry(), entry(version="default")], "a different `version`"),
        ([entry(version="a", weight=0), entry(version="b", weight=0)], "no version has a weight"),
        ([entry(), entry(id="n", aliases=["m"])], "the same name"),
        ([entry(version="a@b")], "version"),
        ([entry(version="a", weight=-1)], "weight"),
    ],
)
def test_versions_that_cannot_be(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schema.parse({"models": entries})
    assert message in str(refused.value)


SETTINGS = OnDemandSettings(60.0, 1.0, 1, has_peers=False)


def test_versions_that_do_not_fit_in_memory_together_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = resolved(entry(), entry(version="new"))
    n_bytes = sum(one.weight_bytes for one in both)
    assert n_bytes > 0
    rollout.check_memory(both, n_bytes)
    with pytest.raises(ConfigError, match=r"m@default and m@new have 0\.0 GiB of weights"):
        rollout.check_memory(both, n_bytes - 1)
    rollout.check_memory([replace(one, on_demand=SETTINGS) for one in both], 1)
    monkeypatch.setattr("serve_app.application.resolving.rollout.check_memory", _refuse)
    with pytest.raises(RayServeException, match="does not fit"):
        build({"models": [entry()]})


def _refuse(models: object, total_bytes: int) -> None:
    raise ConfigError("it does not fit")
