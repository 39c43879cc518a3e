"""The times of a slice, by which a plan of stages tells those of all."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.llama.model import Model
from serve_app.measure import plan
from serve_app.openvino import slices
from serve_app.openvino.convert import shape_of


def test_some_layers_are_measured_with_a_part_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(slices, "_BYTES", 0)  # two layers and a third of the output
    model = Model(BUILTIN_MODEL, vocab_only=True)
    shape = shape_of(model.files)
    times = plan.measured(model, threads=1, n_slots=2)
    assert times.shape.layer_bytes == shape.layer_bytes[:2]
    assert 0 < times.shape.output_bytes < shape.output_bytes / 2
    assert times.profile.decode_s.keys() == {1, 2}
    part, whole = (times.seconds_of(shape, range(n)) for n in (2, 6))
    assert 0 < part(2, 0) < whole(2, 0)
    assert 0 < part(0, 64) < whole(0, 64) == pytest.approx(3 * part(0, 64), rel=0.1)
