"""How the texts of a batch are grouped for attention."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.kernels.openvino.encoder import group


def test_texts_of_about_one_length_are_groups_of_their_own() -> None:
    groups = group(np.repeat([0, 1, 2, -1], [16, 9, 15, 8]))
    assert groups.shape == (4, 16)
    assert groups[2].tolist() == [*range(16, 25), *[-1] * 7]  # behind the padding and text 0
    assert sorted(groups[groups >= 0].tolist()) == list(range(48))


def test_a_long_text_among_short_ones_is_in_one_group_with_them() -> None:
    texts = np.repeat(np.arange(9), [64, *[2] * 8])
    assert group(texts).tolist() == [list(range(80))]


def test_a_text_alone_is_a_group() -> None:
    assert group(np.zeros(7, np.int64)).tolist() == [list(range(7))]
