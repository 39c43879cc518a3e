"""What Kubernetes and KubeRay take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RAY_SERVICE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/kuberay/rayservice.json").read_text()
)
"""The schema of KubeRay's own definition; parts that are Kubernetes' types are left to `check`."""
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: an old one, and the newest that the package knows."""


def check(document: dict[str, Any]) -> None:
    """Hold a document to JSON schemas made from Kubernetes' API, which kubeconform uses too. Unknown fields
    are refused. Raises the package's ValidationError. Skips the test where it is not installed."""
    validator: Any = pytest.importorskip("kubernetes_validate")
    for version in VERSIONS:
        validator.validate(document, version, strict=True)
