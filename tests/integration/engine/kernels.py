"""The backends that the same tests run over."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from serve_app.engine import EngineOptions
from serve_app.engine.options import KernelsName

NAMES = (
    "llama.cpp",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(
            find_spec("openvino") is None, reason="corral[openvino] is not installed"
        ),
    ),
)


def with_kernels(options: EngineOptions, name: KernelsName) -> EngineOptions:
    """These options over that backend, whose cache has one kind if it is OpenVINO's."""
    if name == "llama.cpp":
        return options
    return replace(options, backend=name, flash_attn=None, kv_unified=None, threads_batch=None)
