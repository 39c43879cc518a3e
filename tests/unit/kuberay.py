"""What Kubernetes and KubeRay take, as far as `cluster/kubernetes` uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RAY_SERVICE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/kuberay/rayservice.json").read_text()
)
"""The schema of KubeRay's own definition; parts that are Kubernetes' types are left to `check`."""


def check(document: Any, kind: str, path: str = "") -> None:
    """Assert that Kubernetes' own Python client knows every field of the document, and that each has its
    type. Skips the test where the client is not installed."""
    client: Any = pytest.importorskip("kubernetes.client")
    if match := re.fullmatch(r"List\[(.*)\]", kind):
        assert isinstance(document, list), path
        for i, item in enumerate(document):
            check(item, match[1], f"{path}[{i}]")
    elif match := re.fullmatch(r"Dict\[str, (\w+)\]", kind):
        assert isinstance(document, dict), path
        for key, value in document.items():
            check(value, match[1], f"{path}.{key}")
    elif kind.startswith("V"):
        model = getattr(client, kind)
        names = {json: python for python, json in model.attribute_map.items()}
        assert set(document) <= set(names), f"{path}: {set(document) - set(names)} of {kind}"
        for key, value in document.items():
            check(value, model.openapi_types[names[key]], f"{path}.{key}")
        # The models themselves refuse a required field that is missing.
        model(**{names[key]: value for key, value in document.items()})
    elif kind in ("str", "int", "bool", "float"):
        expected = {"str": str, "int": int, "bool": bool, "float": float}[kind]
        assert type(document) is expected, f"{path}: {document!r} is no {kind}"
    else:
        assert kind == "object", f"{path}: {kind} is not checked"
