"""As much of `kubectl kustomize` as `cluster/` uses: resources, components, patches, ConfigMaps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]


def render(folder: Path) -> list[Document]:
    """All documents of a folder with a `kustomization.yaml`, in no special order."""
    return _rendered(folder, [])


def _rendered(folder: Path, documents: list[Document]) -> list[Document]:
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}
    assert said.keys() <= known, f"{folder}: {said.keys() - known}"
    documents = [*documents]
    for name in said.get("resources", ()):
        path = folder / name
        if path.is_dir():
            documents += _rendered(path, [])
        else:
            documents += yaml.safe_load_all(path.read_text())
    for one in said.get("configMapGenerator", ()):
        metadata = {"name": one["name"], "labels": one["options"]["labels"]}
        data = {name: (folder / name).read_text() for name in one["files"]}
        assert one["options"]["disableNameSuffixHash"]
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    for name in said.get("components", ()):
        documents = _rendered(folder / name, documents)
    for patch in said.get("patches", ()):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        documents = _patched(documents, patch["target"], yaml.safe_load(text))
    return documents


def _patched(documents: list[Document], target: Document, steps: list[Document]) -> list[Document]:
    chosen = [
        document
        for document in documents
        if (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"])
    ]
    assert chosen, f"there is no {target}"
    return [_changed(one, steps) if one in chosen else one for one in documents]


def _changed(document: Document, steps: list[Document]) -> Document:
    changed = copy.deepcopy(document)
    for step in steps:
        *way, last = step["path"].removeprefix("/").split("/")
        at: Any = changed
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if isinstance(at, list):
            assert (step["op"], last == "-") in (("add", True), ("replace", False)), step
            index = len(at) if last == "-" else int(last)
            at[index : index + 1] = [step["value"]]
        else:
            assert step["op"] == "add" or (step["op"] == "replace" and last in at), step
            at[last] = step["value"]
    return changed
