"""What `build` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve import Application
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.base.errors import ConfigError
from serve_app.cluster.deployments import own_http_options
from serve_app.config.schema import IngressConfig
from serve_app.run.ingress import IngressSettings

MODELS = [{"id": "demo", "source": {"builtin": True}, "engine": {"n_slots": 1, "n_ctx_slot": 256}}]


OPEN, LOOPBACK = "0.0.0.0", "127.0.0.1"


@pytest.mark.parametrize("host", [OPEN, None])
@pytest.mark.parametrize(
    ("ingress", "refused"),
    [({}, True), ({"allow_anonymous": True}, False), ({"api_key_file": Path("keys.yaml")}, False)],
    ids=["open", "anonymous", "keys"],
)
def test_haproxy_wants_keys(
    ingress: dict[str, Any], refused: bool, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests come over loopback, wherever its clients are."""
    args = {"models": MODELS, "ingress": ingress}
    build(args)
    put_behind_haproxy(monkeypatch, host)
    if refused:
        with pytest.raises(RayServeException, match=r"ingress\.api_key_file"):
            build(args)
    else:
        build(args)


def test_haproxy_that_only_this_machine_can_ask_hides_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_behind_haproxy(monkeypatch, LOOPBACK)
    assert access(build({"models": MODELS})).ui == "auto"


def put_behind_haproxy(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    """As where HAProxy listens on this address; None if Serve does not run, which would know."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    put_on_serve(monkeypatch, None if host is None else HTTPOptions(host=host))


def put_on_serve(
    monkeypatch: pytest.MonkeyPatch,
    http: HTTPOptions | None,
    location: ProxyLocation = ProxyLocation.EveryNode,
) -> None:
    """As where Serve runs with these options, and its proxies are there; None if it does not run."""
    asked = SimpleNamespace(remote=lambda: location)
    controller = SimpleNamespace(get_proxy_location=asked)
    serve = None if http is None else SimpleNamespace(http_config=http, _controller=controller)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda **_: serve)


def test_ingresses_listen_themselves_where_serve_has_no_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    http = HTTPOptions(host=OPEN, port=8123, keep_alive_timeout_s=7)
    for location in ProxyLocation:
        put_on_serve(monkeypatch, http, location)
        assert own_http_options() == (http if location is ProxyLocation.Disabled else None)
    put_on_serve(monkeypatch, None)
    assert own_http_options() is None


def test_an_ingress_that_listens_itself_refuses_what_only_a_proxy_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_on_serve(monkeypatch, HTTPOptions(root_path="/x"), ProxyLocation.Disabled)
    with pytest.raises(ConfigError, match=r"http_options\.root_path"):
        own_http_options()


def test_haproxy_hides_nobody_where_serve_has_no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    put_on_serve(monkeypatch, HTTPOptions(host=OPEN), ProxyLocation.Disabled)
    assert access(build({"models": MODELS})).ui == "auto"


@pytest.mark.parametrize(("ui", "behind"), [("auto", False), (True, True), (False, False)])
def test_behind_haproxy_the_page_is_only_there_if_it_was_asked_for(
    ui: object, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"models": MODELS, "ingress": {"api_key_file": Path("keys.yaml"), "ui": ui}}
    assert access(build(args)).ui == ui
    put_behind_haproxy(monkeypatch, OPEN)
    assert access(build(args)).ui == behind


def access(application: Application) -> IngressConfig:
    """What the ingress gets."""
    arguments = application._bound_deployment.init_args
    (found,) = (one.config for one in arguments if isinstance(one, IngressSettings))
    return found
