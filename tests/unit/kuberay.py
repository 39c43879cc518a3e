"""What Kubernetes and KubeRay take, as far as `cluster/kubernetes` uses it."""

from __future__ import annotations

import re
from typing import Any

import pytest

_TEXT, _WHOLE, _YES_OR_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_OF_KUBERNETES = {"type": "object"}  # see `check`


def _record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": [*required],
        "additionalProperties": False,
    }


_CREDENTIAL = _record(value=_TEXT, valueFrom=_OF_KUBERNETES)
# Of KubeRay's API reference, ray.io/v1 (its own schema of more than a megabyte spells out all of a pod's
# fields): https://ray-project.github.io/kuberay/reference/api/
RAY_SERVICE = _record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_OF_KUBERNETES,
    spec=_record(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=_TEXT,
        rayClusterConfig=_record(
            ("headGroupSpec",),
            rayVersion=_TEXT,
            authOptions=_record(mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling=_YES_OR_NO,
            autoscalerOptions=_record(
                version={"enum": ["v1", "v2"]},
                idleTimeoutSeconds=_WHOLE,
                upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
                resources=_OF_KUBERNETES,
            ),
            gcsFaultToleranceOptions=_record(
                ("redisAddress",),
                redisAddress=_TEXT,
                redisUsername=_CREDENTIAL,
                redisPassword=_CREDENTIAL,
                externalStorageNamespace=_TEXT,
            ),
            headGroupSpec=_record(
                ("rayStartParams", "template"),
                rayStartParams=_TEXTS,
                template=_OF_KUBERNETES,
            ),
            workerGroupSpecs={
                "type": "array",
                "items": _record(
                    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
                    groupName=_TEXT,
                    replicas=_WHOLE,
                    minReplicas=_WHOLE,
                    maxReplicas=_WHOLE,
                    rayStartParams=_TEXTS,
                    template=_OF_KUBERNETES,
                ),
            },
        ),
    ),
)


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
    elif kind in ("str", "int", "bool", "float"):
        expected = {"str": str, "int": int, "bool": bool, "float": float}[kind]
        assert type(document) is expected, f"{path}: {document!r} is no {kind}"
    else:
        assert kind == "object", f"{path}: {kind} is not checked"
