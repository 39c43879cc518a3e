"""The settings of ingresses, by the configuration and by the proxy before them."""

from __future__ import annotations

import os

import ray
from ray.serve.context import _get_global_client

from serve_app.config.schema import BatchConfig, IngressConfig
from serve_app.errors import ConfigError
from serve_app.ingress.access.addresses import is_loopback
from serve_app.ingress.access.auth import Access
from serve_app.ingress.access.bodies import BodyLimits
from serve_app.ingress.batch.store import BatchLimits, BatchOptions
from serve_app.ingress.responses.store import Bounds


def access(ingress: IngressConfig) -> Access:
    """The access rules, by the configuration and by the proxy before the ingress."""
    hidden = ingress.ui == "auto" and _proxy_hides_strangers()  # loopback means nothing then
    return Access(
        ingress.api_key_file,
        ingress.allow_anonymous,
        False if hidden else ingress.ui,
        tuple(ingress.cors_origins),
        tuple(ingress.allowed_hosts),
        ingress.anonymous_admin,
        ingress.strict,
        BodyLimits(ingress.open_bodies, ingress.max_open_bodies_mib << 20, ingress.min_body_rate),
        ingress.max_ongoing_requests,
        tuple(ingress.disabled_routes),
        ingress.verbose,
        tuple(ingress.picture_hosts),
    )


def kept_responses(ingress: IngressConfig) -> Bounds:
    """How many responses are kept."""
    return Bounds(
        ingress.responses_kept_s,
        ingress.max_responses_per_key,
        ingress.max_responses_mib_per_key << 20,
        ingress.max_responses_mib << 20,
    )


def batches(configured: BatchConfig) -> BatchOptions | None:
    """Where files and batches are kept, and how much; None if they are not."""
    if configured.folder is None:
        return None
    limits = BatchLimits(
        configured.max_file_mib << 20,
        configured.max_files,
        configured.max_total_mib << 20,
        configured.max_lines,
        configured.max_batches,
        keep_s=configured.keep_days * 86400.0,
    )
    return BatchOptions(configured.folder.expanduser(), limits, configured.max_concurrency)


def refuse_strangers(ingress: IngressConfig) -> None:
    """Raises ConfigError where nobody could tell who comes from another machine, and it matters."""
    is_open = ingress.api_key_file is None and not ingress.allow_anonymous
    if is_open and _proxy_hides_strangers():
        raise ConfigError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 hides which requests come from other machines. Set "
            "http_options.host: 127.0.0.1 (this machine only), ingress.api_key_file, or "
            "ingress.allow_anonymous: true"
        )


def _proxy_hides_strangers() -> bool:
    """Whether other machines' requests can look like this one's own: Serve's HAProxy asks the ingress over
    loopback, adds nothing to tell who asked, and listens where Serve's `http_options.host` says."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return False
    host = _http_host()
    return host is None or not is_loopback(host)


def _http_host() -> str | None:
    """Serve's `http_options.host`, which no client has a say in: HAProxy listens on what it says, and it
    stays while Serve runs. None if Serve does not run here."""
    serve = (
        _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    )
    return None if serve is None else serve.http_config.host
