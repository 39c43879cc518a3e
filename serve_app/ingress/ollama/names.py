"""Models' names as Ollama has them: `name:tag`, where `name` is `name:latest`, in any case.

Source: ollama, types/model/name.go and docs/api.md, "Model names".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from serve_app.ingress import model_registry

M = TypeVar("M", bound=model_registry.ModelInfo)

_DEFAULT_TAG = ":latest"
_DEFAULT_PLACES = ("registry.ollama.ai/", "library/")
"""The parts that Ollama reads before a name without them."""


def displayed(model_id: str) -> str:
    """A model's id with a tag."""
    has_tag = ":" in model_id.rpartition("/")[2]
    return model_id if has_tag else model_id + _DEFAULT_TAG


def find(models: Mapping[str, M], name: str | None, beginning: str | None = None) -> M:
    """The model of that name, or the first without one; for `beginning`, see `model_registry.find`. Raises
    ModelNotFoundError."""
    if name is not None and name not in models:
        wanted = _canonical(name)
        for model in models.values():
            for known in (model.id, model_registry.family(model), *model.aliases):
                if wanted == _canonical(known):
                    return model_registry.find(models, known, beginning)
    return model_registry.find(models, name, beginning)


def _canonical(name: str) -> str:
    """The same for all names of a model."""
    found = displayed(name).lower()
    for place in _DEFAULT_PLACES:
        found = found.removeprefix(place)
    return found
