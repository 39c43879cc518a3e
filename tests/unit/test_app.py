"""What `build` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.ingress.http.auth import Access

MODELS = [{"id": "demo", "source": {"builtin": True}, "engine": {"n_slots": 1, "n_ctx_slot": 256}}]


@pytest.mark.parametrize(
    ("ingress", "refused"),
    [({}, True), ({"allow_anonymous": True}, False), ({"api_key_file": Path("keys.yaml")}, False)],
    ids=["open", "anonymous", "keys"],
)
def test_haproxy_wants_keys(
    ingress: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests come over loopback, wherever its clients are."""
    args = {"models": MODELS, "ingress": ingress}
    build(args)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if refused:
        with pytest.raises(RayServeException, match=r"ingress\.api_key_file"):
            build(args)
    else:
        build(args)


@pytest.mark.parametrize(("ui", "behind"), [("auto", False), (True, True), (False, False)])
def test_behind_haproxy_the_page_is_only_there_if_it_was_asked_for(
    ui: object, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"models": MODELS, "ingress": {"api_key_file": Path("keys.yaml"), "ui": ui}}
    assert access(build(args)).ui == ui
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert access(build(args)).ui == behind


def access(application: Application) -> Access:
    """What the ingress gets."""
    (found,) = (one for one in application._bound_deployment.init_args if isinstance(one, Access))
    return found
