"""The architectures that OpenVINO's graphs are built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """The traits that tell it from others."""

    interleaved: bool = False
    """Whether neighbours turn together, as llama.cpp stores Llama's heads; otherwise halves do."""


ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
}
