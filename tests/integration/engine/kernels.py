"""The backends that the same tests run over."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from serve_app.base.engine_options import KernelsName
from serve_app.engine import EngineOptions

_OPENVINO = pytest.mark.skipif(
    find_spec("openvino") is None, reason="corral[openvino] is not installed"
)
NAMES = ("llama.cpp", pytest.param("openvino", marks=_OPENVINO))


def openvino(**more: Any) -> Any:
    """A parameter: the options that change with OpenVINO's backend, whose cache has one kind."""
    changed = {"backend": "openvino", "flash_attn": None, "kv_unified": None, **more}
    return pytest.param(changed, marks=_OPENVINO, id=" ".join(["openvino", *more]))


def with_kernels(options: EngineOptions, name: KernelsName) -> EngineOptions:
    """These options over that backend."""
    if name == "llama.cpp":
        return options
    return replace(options, backend=name, flash_attn=None, kv_unified=None)
