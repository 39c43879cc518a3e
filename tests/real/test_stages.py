"""Real models in two stages find the tokens of a text as likely as one engine with all layers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.engine import Engine
from serve_app.kernels.openvino.paged import compiling
from tests.integration.stages.test_chain import chains_of, engines_of
from tests.real.conftest import OPTIONS
from tests.real.test_text import logprobs_of

_settings = compiling.settings


def _with_floats(*arguments: Any) -> dict[str, Any]:
    """Activations stay floats. Where they become integers of 8 bits, a last bit that differs makes other
    integers, and in the end as much of a difference as any other order of additions."""
    return _settings(*arguments) | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


async def test_two_stages_read_a_text_as_one_engine(
    model: Path, load: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "settings", _with_floats)
    whole = np.array(await logprobs_of(load(backend="openvino"), model))
    options = replace(OPTIONS, backend="openvino", threads=1)
    with engines_of(chains_of(2), options, model) as engines:
        for engine in engines:
            apart = abs(np.array(await logprobs_of(engine, model)) - whole)
            print(f"{model.name}: {apart.max():.4f} at most, {apart.mean():.5f} on average")
            assert apart.max() < 0.05
            assert apart.mean() < 0.01
