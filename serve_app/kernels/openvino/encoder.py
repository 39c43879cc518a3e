"""An encoder compiled by OpenVINO: texts whose tokens see the whole text, several in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError
from serve_app.base.formats import Row
from serve_app.base.sharing.pacing import pace
from serve_app.kernels.openvino.graph import GROUPED, MASK, PLACES, VECTORS, WINDOW_MASK
from serve_app.kernels.openvino.paged.compiling import forgetting, infer, settings

# Added to the scores of tokens that are not seen.
_UNSEEN = np.float32(-1e30)
# Batches and groups are filled up to a multiple of so many rows: kernels are prepared for each number.
_MULTIPLE = 16
_NO_TEXT = -2


class Encoder:
    """Computes a vector for each token. Only one thread, always the same, may use it. Raises ConfigError if
    the model cannot be compiled."""

    def __init__(self, path: Path, *, threads: int, window: int = 0) -> None:
        """`window` is the size of the window, with half of it on each side, in layers that have one."""
        weights = path.with_suffix(".bin")
        self.n_bytes = weights.stat().st_size
        self._window = window
        try:
            model = openvino.Core().read_model(path)
            self._has_window = any(WINDOW_MASK in port.get_names() for port in model.inputs)
            with forgetting(weights), pace():
                executable = openvino.Core().compile_model(model, "CPU", settings(threads))
        except RuntimeError as error:
            raise ConfigError(f"OpenVINO cannot compile {path}: {error}") from error
        self._request: openvino.InferRequest | None = executable.create_infer_request()

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """A vector for each row, with all rows of its text in the batch; the outputs of a classifier.
        Raises DecodeError."""
        padding = [(0, 0, -1, False)] * (-len(rows) % _MULTIPLE)
        table = np.array([row[:3] for row in (*rows, *padding)], np.int64)
        tokens, positions, texts = (np.ascontiguousarray(column) for column in table.T)
        groups = group(texts)
        has_token = groups >= 0
        places = np.zeros(len(texts), np.int64)
        places[groups[has_token]] = np.flatnonzero(has_token)
        sees = _compare_pairs(np.equal, np.where(has_token, texts[groups], _NO_TEXT))
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            GROUPED: np.maximum(groups, 0),
            PLACES: places,
            MASK: _mask(sees),
        }
        if self._has_window:
            is_near = np.abs(_compare_pairs(np.subtract, positions[groups])) <= self._window // 2
            inputs[WINDOW_MASK] = _mask(sees & is_near)
        request = self._request
        assert request is not None
        infer(request, inputs)
        vectors: NDArray[np.float32] = request.get_tensor(VECTORS).data[0, : len(rows)].copy()
        return vectors

    def close(self) -> None:
        """Free the compiled model. Idempotent."""
        self._request = None


def group(texts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of each group, -1 where it has no more. A text is a group, or all rows are one where that
    has fewer pairs. Each text's rows follow each other. Pure."""
    _, first, lengths = np.unique(texts, return_index=True, return_counts=True)
    longest = -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE
    if len(first) * longest**2 >= len(texts) ** 2:
        return np.arange(len(texts))[None]
    at = np.arange(longest)
    return np.where(at < lengths[:, None], first[:, None] + at, -1)


def _compare_pairs(function: np.ufunc, values: NDArray[np.int64]) -> NDArray[Any]:
    pairs: NDArray[Any] = function(values[:, :, None], values[:, None])
    return pairs


def _mask(sees: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(sees, np.float32(0), _UNSEEN)[:, None]
