"""The defaults of a model's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """A model's defaults, as the configuration has them. What that leaves open, the model's file may
    recommend."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, by the names that SamplingParams has."""
    max_tokens: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    """Takes the place of the file's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_budget: int = -1
    """Tokens of reasoning; -1: no bound."""
    reasoning_budget_message: str = ""
    reasoning_format: str | None = None
    adapters: tuple[str, ...] = ()
    """Adapters of requests that name none."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Instructions before texts that become vectors, by their names."""

    def over(self, recommended: Mapping[str, Any]) -> ModelDefaults:
        """The defaults before the sampling parameters that the model's file recommends."""
        return replace(self, sampling={**recommended, **self.sampling})


NO_DEFAULTS = ModelDefaults()
