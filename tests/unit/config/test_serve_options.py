"""Options that Ray Serve gets: Serve's own names and values, beside Corral's defaults."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Deployment
from ray.serve.schema import RayActorOptionsSchema

from serve_app.base.errors import ConfigError
from serve_app.cluster.deployments import engine_options, ingress_options
from serve_app.cluster.serve_check import check_serve
from serve_app.config import schema
from serve_app.config.serve_options import ActorOptions, RayServeOptions
from serve_app.run.resolving import resolve

ROOT = Path(__file__).parents[3]
NO_OPTIONS = {"self", "func_or_class", "version", "_init_args", "_init_kwargs", "_internal"}
"""Parameters of `Deployment.options` that are no options of a deployment; Serve refuses `version`."""


def args(serve: dict[str, Any], ingress: dict[str, Any] | None = None) -> dict[str, Any]:
    model = {"id": "m", "source": {"builtin": True}, "engine": {"n_slots": 4, "n_ctx_slot": 256}}
    return {"models": [model | {"serve": serve}], "ingress": {"serve": ingress or {}}}


def test_the_names_are_all_that_serve_has() -> None:
    names = set(inspect.signature(Deployment.options).parameters) - NO_OPTIONS
    assert names == RayServeOptions.KNOWN | RayServeOptions.CORRALS_OWN
    assert set(RayActorOptionsSchema.model_fields) == ActorOptions.KNOWN


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"max_ongoing_request": 1}, "max_ongoing_request: Ray Serve has no such option, did you"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests: Input should be greater than 0"),
        ({"health_check_period_s": 0}, "health_check_period_s: Input should be greater than 0"),
        ({"num_replicas": "two"}, "num_replicas: Input should be a valid integer"),
        ({"name": "mine"}, "name: Corral sets this option of Ray Serve itself"),
        (
            {"ray_actor_options": {"num_cpu": 1}},
            "ray_actor_options.num_cpu: Ray Serve has no such option, did you mean num_cpus?",
        ),
    ],
)
def test_names_are_checked_without_ray(serve: dict[str, Any], message: str) -> None:
    for place, given in (("models.0", args(serve)), ("ingress", args({}, serve))):
        with pytest.raises(ConfigError) as refused:
            schema.parse(given)
        assert f"{place}.serve.{message}" in str(refused.value)


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (
            {"autoscaling_config": {"max_replica": 1}},
            "autoscaling_config.max_replica: there is no such field, did you mean max_replicas?",
        ),
        ({"autoscaling_config": {"min_replicas": -1}}, "autoscaling_config.min_replicas: "),
        ({"max_constructor_retry_count": 0}, "max_constructor_retry_count: "),
        ({"max_surge_percent": 200}, "max_surge_percent: "),
        ({"logging_config": {"log_level": 3.5}}, "logging_config.log_level"),
        ({"num_replicas": 1, "autoscaling_config": {}}, ": Value error, Manually setting num_rep"),
    ],
)
def test_serve_checks_all_values(serve: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    application = {"name": "corral", "args": args({}, serve)}
    file.write_text(yaml.safe_dump({"applications": [application]}, sort_keys=False))
    app = schema.load(file)
    with pytest.raises(ConfigError) as refused:
        check_serve(app, file)
    told = str(refused.value)
    assert told.startswith(f"invalid configuration: {file}:")
    assert f": ingress.serve{'' if message.startswith(':') else '.'}{message}" in told


def test_options_that_corral_does_not_know_reach_serve() -> None:
    serve = {
        "max_queued_requests": 7,
        "logging_config": {"log_level": "DEBUG"},
        "ray_actor_options": {"num_gpus": 0, "runtime_env": {"env_vars": {"A": "b"}}},
    }
    app = schema.parse(args(serve, serve))
    check_serve(app)
    (resolved,) = resolve(app)
    engine, ingress = engine_options(app.models[0], resolved), ingress_options(app.ingress)
    for options, num_cpus in ((engine, resolved.num_cpus), (ingress, 0)):
        assert options["max_queued_requests"] == 7
        assert options["logging_config"] == {"log_level": "DEBUG"}
        assert options["ray_actor_options"] == {
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "runtime_env": {"env_vars": {"A": "b"}},
        }


def test_the_configuration_goes_to_other_processes() -> None:
    ingress = schema.parse(args({}, {"max_queued_requests": 7})).ingress
    assert pickle.loads(pickle.dumps(ingress)) == ingress


def test_options_are_read_without_ray() -> None:
    """As a server of one machine reads them, which never imports Ray."""
    serve = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 1}, "health_check_period_s": 9}
    work = (
        "import sys, json; from serve_app.config import schema; "
        "schema.parse(json.loads(sys.argv[1])); print('ray' in sys.modules)"
    )
    command = [sys.executable, "-c", work, json.dumps(args(serve))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "False\n"
