"""Shortens KubeRay's definition of a RayService to a JSON schema for tests:

python -m tests.documents.kuberay ray.io_rayservices.yaml > tests/data/kuberay/rayservice.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_KEPT = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "required", "pattern")
# Kubernetes' own types, which make up most of it; tests check them by Kubernetes' own schemas.
_OF_KUBERNETES = {"template", "serveService", "headService", "metadata"}


def shortened(schema: dict[str, Any]) -> dict[str, Any]:
    """The same without texts, and with unknown fields refused, as `kubectl apply` does by default."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: schema[key] for key in _KEPT if key in schema}
    if "items" in schema:
        kept["items"] = shortened(schema["items"])
    if isinstance(values := schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = shortened(values)
    if "properties" in schema:
        kept["properties"] = {
            name: {"type": "object"} if name in _OF_KUBERNETES else shortened(field)
            for name, field in schema["properties"].items()
            if name != "status"
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    return kept


def main() -> None:
    """Print the schema of version v1."""
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema = shortened(version["schema"]["openAPIV3Schema"])
    print(json.dumps(schema, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main()
