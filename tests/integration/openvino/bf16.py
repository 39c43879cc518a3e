"""Attention with bf16: for tests of it, and the processors that have it."""

from __future__ import annotations

from dataclasses import replace

import openvino
import pytest

from serve_app.engine import EngineOptions

COMPUTES_BF16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
computes_bf16 = pytest.mark.skipif(not COMPUTES_BF16, reason="no bf16 on this processor")


def with_bf16(options: EngineOptions) -> EngineOptions:
    """The options, with keys and values as bf16."""
    return replace(options, cache_type_k="bf16", cache_type_v="bf16")
