"""Chooses the backend that is faster for the slots. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, alike, request_s
from serve_app.engine.options import EngineOptions, KernelsName

LLAMA_CPP: KernelsName = "llama.cpp"
OPENVINO: KernelsName = "openvino"
# OpenVINO must take so much less time, as a part: less is noise, and llama.cpp can do more.
_LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs of one backend's batches."""

    mode: Mode
    profile: Profile
    undisturbed: bool
    """Whether it had its threads' time meanwhile: otherwise nothing is to be kept of it."""


@dataclass(frozen=True, slots=True)
class KernelsChoice:
    """A backend, and why it is this one, in one line."""

    name: KernelsName
    reason: str

    @classmethod
    def parse(cls, document: object) -> KernelsChoice:
        """From its fields as JSON. Raises TypeError for anything else."""
        match document:
            case {"name": "llama.cpp" | "openvino" as name, "reason": str(reason)}:
                return cls(OPENVINO if name == OPENVINO else LLAMA_CPP, reason)
        raise TypeError("it holds no choice of a backend")


def faster(measured: Mapping[KernelsName, Measured], options: EngineOptions) -> KernelsChoice:
    """The backend with which a request takes less of the machine's time.

    A server with several slots often has a single stream, too. So the time is the geometric mean of
    two: with one sequence, and with all slots busy. A ratio counts the same upwards and downwards then.
    """
    ratios = _ratios(measured, options)
    if not ratios:
        return KernelsChoice(LLAMA_CPP, "nothing was measured")
    mean = math.exp(sum(math.log(one) for one in ratios.values()) / len(ratios))
    name = OPENVINO if mean <= 1 - _LEAST_GAIN else LLAMA_CPP
    parts = ", ".join(f"{ratio:.2f} with {n} at once" for n, ratio in ratios.items())
    reason = f"measured: the time of a request, OpenVINO's to llama.cpp's, is {parts}"
    if len(ratios) > 1:
        reason += f", {mean:.2f} in the mean"
    return KernelsChoice(name, reason)


def _ratios(measured: Mapping[KernelsName, Measured], options: EngineOptions) -> dict[int, float]:
    """OpenVINO's seconds of a request to llama.cpp's, by sequences at once."""
    modes = {name: one.mode for name, one in measured.items()}
    profiles = alike({one.mode: one.profile for one in measured.values()})
    found = {}
    for n in sorted({1, options.n_slots}):
        sized = replace(options, n_slots=n)
        seconds = {name: request_s(profiles[mode], sized, mode) for name, mode in modes.items()}
        if all(seconds.values()):
            found[n] = seconds[OPENVINO] / seconds[LLAMA_CPP]
    return found
