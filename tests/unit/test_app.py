"""What `build` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.app import build

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
