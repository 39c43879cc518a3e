"""Ray Serve's options of a deployment, by Serve's own names. Needs no Ray.

Only names are checked here, and the values that Corral reads itself. Serve's own models check all values
before anything is deployed: `serve_app.cluster.serve_check`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from serve_app.config.problems import did_you_mean


class _PassedOn(BaseModel):
    """Options that Ray gets as they are. Fields are those that Corral reads as well."""

    model_config = ConfigDict(frozen=True, extra="allow")

    KNOWN: ClassVar[frozenset[str]]
    """The names that Ray has."""
    CORRALS_OWN: ClassVar[frozenset[str]] = frozenset()
    """Names of options that Corral gives itself."""

    @model_validator(mode="before")
    @classmethod
    def _has_known_names(cls, options: Any) -> Any:
        names = map(str, options) if isinstance(options, dict) else ()
        problems = [
            InitErrorDetails(
                type=PydanticCustomError("unknown", "{problem}", {"problem": cls._problem(name)}),
                loc=(name,),
                input=name,
            )
            for name in names
            if name not in cls.KNOWN
        ]
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return options

    @classmethod
    def _problem(cls, name: str) -> str:
        if name in cls.CORRALS_OWN:
            return "Corral sets this option of Ray Serve itself"
        return f"Ray Serve has no such option{did_you_mean(name, cls.KNOWN)}"

    @property
    def explicit_options(self) -> dict[str, Any]:
        """The options that the configuration gives."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class ActorOptions(_PassedOn):
    """The resources that Ray reserves for one replica: `RayActorOptionsSchema` of Ray Serve."""

    KNOWN = frozenset(
        (
            *("accelerator_type", "fallback_strategy", "label_selector", "memory", "num_cpus"),
            *("num_gpus", "resources", "runtime_env"),
        )
    )

    num_cpus: NonNegativeFloat | None = None


class RayServeOptions(_PassedOn):
    """The options of a model's deployment, or of the ingress's: `Deployment.options` of Ray Serve."""

    KNOWN = frozenset(
        (
            *("autoscaling_config", "backpressure_config", "deployment_actors"),
            *("graceful_shutdown_timeout_s", "graceful_shutdown_wait_loop_s"),
            *("health_check_period_s", "health_check_timeout_s", "logging_config"),
            *("max_constructor_retry_count", "max_ongoing_requests", "max_queued_requests"),
            *("max_replicas_per_node", "max_surge_percent", "num_replicas"),
            *("placement_group_bundle_label_selector", "placement_group_bundles"),
            *("placement_group_strategy", "ray_actor_options"),
        )
    )
    CORRALS_OWN = frozenset(
        ("gang_scheduling_config", "name", "request_router_config", "user_config")
    )

    num_replicas: PositiveInt | None = None
    autoscaling_config: dict[str, Any] | None = None
    max_ongoing_requests: PositiveInt | None = None
    max_replicas_per_node: PositiveInt | None = None
    graceful_shutdown_timeout_s: NonNegativeFloat | None = None
    health_check_period_s: PositiveFloat = 5
    health_check_timeout_s: PositiveFloat = 30
    ray_actor_options: ActorOptions = ActorOptions()

    @property
    def num_cpus(self) -> float | None:
        """CPUs that Ray reserves for a replica, hyper-threads counted."""
        return self.ray_actor_options.num_cpus

    def scaling_bound(self, name: str) -> int | None:
        """A number of replicas in `autoscaling_config`, if the configuration gives it."""
        bound = (self.autoscaling_config or {}).get(name)
        return bound if isinstance(bound, int) else None
