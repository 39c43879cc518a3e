"""Checks Ray Serve's options by Serve's own models."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, PositiveInt, ValidationError

from serve_app.base.errors import ConfigError
from serve_app.config.problems import Location, describe_errors
from serve_app.config.schema import AppConfig
from serve_app.config.serve_options import RayServeOptions


def check_serve(app: AppConfig, file: Path | None = None) -> None:
    """Check all of Ray Serve's options by Serve's own models. Raises ConfigError that names every one that
    is wrong, and its line in the file that the configuration is from."""
    places: dict[Location, RayServeOptions] = {
        ("models", i, "serve"): model.serve for i, model in enumerate(app.models)
    }
    problems = [
        problem
        for place, options in (places | {("ingress", "serve"): app.ingress.serve}).items()
        if options.explicit_options and (problem := _problem(options, place, file))
    ]
    if problems:
        raise ConfigError(f"invalid configuration: {'; '.join(problems)}")


def _problem(options: RayServeOptions, place: Location, file: Path | None) -> str | None:
    from ray.serve.config import AutoscalingConfig  # takes seconds, and most servers need none
    from ray.serve.schema import DeploymentSchema

    class Scaling(AutoscalingConfig):
        model_config = ConfigDict(extra="forbid")

    class Deployment(DeploymentSchema):
        autoscaling_config: Scaling | None = None
        max_constructor_retry_count: PositiveInt = 1

    try:
        Deployment.model_validate({"name": "checked"} | options.explicit_options)
    except ValidationError as error:
        return describe_errors(error, Deployment, file=file, within=place)
    return None
