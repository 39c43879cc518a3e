"""What `build` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from serve_app.app import build
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
    serve = None if host is None else SimpleNamespace(http_config=HTTPOptions(host=host))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda **_: serve)


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
