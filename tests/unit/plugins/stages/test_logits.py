"""Logits on their way to an engine, of which the highest are enough."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.plugins.stages.frames import Frame, arrays_of, body_of, frame_of, values_of
from serve_app.plugins.stages.logits import highest_of, rows_of


def test_wanted_logits_arrive_and_others_are_left_out() -> None:
    logits = np.random.default_rng(1).standard_normal((4, 30_000)).astype(np.float32)
    logits[2, [7, 8]] = 9.0  # which comes first depends on all
    sent = highest_of({"logits": logits}, {"n_highest": np.array([3, 0, 5, 1], np.int32)})
    body = body_of(Frame(2, 0, 1, "compute", arrays_of(sent)))
    assert len(body) < 2.1 * 2 * 30_000
    rows = rows_of(values_of(frame_of(bytearray(body)).arrays))["logits"]
    for i, n in ((0, 3), (3, 1)):
        highest = np.argsort(-logits[i])[:n]
        assert np.array_equal(rows[i, highest], logits[i, highest])
        assert np.isneginf(np.delete(rows[i], highest)).all()
    assert np.allclose(rows[1:3], logits[1:3], atol=2e-3)


def test_other_values_are_as_they_were() -> None:
    values = {"vectors": np.ones((2, 3), np.float32)}
    assert highest_of(values, {"n_highest": np.array([1])}) is values
    assert rows_of(values) is values
