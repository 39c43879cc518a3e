"""A GGUF file's matrices as OpenVINO's kernels take them: small integers, with a scale for each group.

The kernels quantise activations, too, and multiply integers. They do so only if the weights' offset is
an integer. With any other one, they compute in floats, and prompts take twice as long. So the
rest of an offset is a further column, which is multiplied by the sum of 32 activations:
`sum(((q - z) s + r) x) = s sum((q - z) x) + r sum(x)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K
from numpy.typing import NDArray

GROUP = 32
"""Weights of a row that have a scale in common, where the file's codes are kept."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _hadamard(size: int) -> Floats:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(np.float32(size))
    return matrix


HADAMARD = _hadamard(GROUP)
"""Turns `GROUP` numbers of a row, and turns them back. One large number becomes smaller ones everywhere,
and products of rows stay what they are. Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in
Rotated LLMs", 2024."""

_PLAIN = (Kind.F32, Kind.F16)
_OF_FOUR_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
# A group has a scale of 16 bits, and nothing else.
_OF_HALF_SCALES = (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0)
# Weights that a thread unpacks at once: what caches of processors have room for.
_AT_ONCE = 2**19
_MOST = 127
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix: each weight is `(code - zero) * scale + offset`."""

    codes: NDArray[np.int8]
    """Codes of shape [rows, groups, weights of a group]; the other arrays have [rows, groups]. Codes fit
    `bits`, without a sign if there are zeros."""
    bits: int
    scales: Floats
    zeros: Bytes | None = None
    offsets: Floats | None = None

    def with_sums(self) -> Quantised:
        """The matrix with a column for each group in place of its offset, and zeros up to whole groups.
        What it is multiplied by has the sums of the groups there. Offsets are rounded to the codes' bits:
        4 or 8, with a scale for each 32."""
        assert self.offsets is not None
        n_rows, n_groups = self.offsets.shape
        columns = np.zeros((n_rows, -(-n_groups // GROUP), GROUP), np.float32)
        columns.reshape(n_rows, -1)[:, :n_groups] = self.offsets
        most, zero = (7, 8) if self.bits == 4 else (_MOST, 0)
        # Kernels keep scales with 16 bits where that is exact.
        scales = (np.abs(columns).max(axis=-1) / most).astype(np.float16).astype(np.float32)
        codes = _codes(columns, scales) + np.int8(zero)
        zeros = None
        if self.zeros is not None:
            zeros = np.concatenate([self.zeros, np.full(scales.shape, zero, np.uint8)], axis=1)
        return Quantised(
            np.concatenate([self.codes, codes], axis=1),
            self.bits,
            np.concatenate([self.scales, scales], axis=1),
            zeros,
        )


def is_rounded(kind: Kind) -> bool:
    """Whether `quantise` rounds to 8 bits: fewer than 32 share a scale, or there is a table."""
    return kind not in (*_PLAIN, Kind.BF16, *_GRIDS)


def matrix_bytes(kind: Kind, n_weights: int, has_wide_zeros: bool) -> int:
    """The most bytes of a matrix with so many weights, when it is converted. Wide zeros are floats."""
    if not is_quantised(kind):
        return n_weights * (2 if kind is Kind.F16 else 4)
    n_codes = GROUP // 2 if kind in _OF_FOUR_BITS else GROUP
    n_others = 2 if kind in _OF_HALF_SCALES else 8 if has_wide_zeros else 6
    return n_weights // GROUP * (n_codes + n_others)


def is_quantised(kind: Kind) -> bool:
    """Whether the weights are integers with scales."""
    return kind not in (*_PLAIN, Kind.BF16)


def floats(data: NDArray[np.generic], kind: Kind) -> NDArray[np.float16] | Floats:
    """All weights of a tensor."""
    if kind in _PLAIN:
        return data  # type: ignore[return-value]
    found: Floats = gguf.dequantize(data, kind)
    return found


def quantise(data: Bytes, kind: Kind) -> Quantised:
    """The matrix with these rows. Raises NotImplementedError for formats that gguf cannot read."""
    parts = _by_rows(_quantise_part, data, kind)
    return Quantised(
        np.concatenate([part.codes for part in parts]),
        parts[0].bits,
        np.concatenate([part.scales for part in parts]),
        _join([part.zeros for part in parts]),
        _join([part.offsets for part in parts]),
    )


def round_matrix(data: NDArray[np.generic], kind: Kind, group: int) -> Quantised:
    """The matrix with these rows, turned by `HADAMARD` and rounded to 8 bits, with a scale for so many
    weights. Raises as `quantise`."""
    parts = _by_rows(partial(_round, group=group), data, kind)
    codes, scales = zip(*parts, strict=True)
    return Quantised(np.concatenate(codes), 8, np.concatenate(scales))


def _round(data: NDArray[Any], kind: Kind, group: int) -> tuple[NDArray[np.int8], Floats]:
    weights = floats(data, kind).astype(np.float32)
    turned = (weights.reshape(-1, GROUP) @ HADAMARD).reshape(len(weights), -1, group)
    scales = np.abs(turned).max(axis=-1) / np.float32(_MOST)
    return _codes(turned, scales), scales


def _by_rows(
    function: Callable[[NDArray[Any], Kind], _Part], data: NDArray[Any], kind: Kind
) -> list[_Part]:
    """The results of a function for pieces of a matrix, computed in threads."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows = max(1, _AT_ONCE // (data.nbytes // len(data) // n_bytes * block))
    pieces = [data[at : at + n_rows] for at in range(0, len(data), n_rows)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy computes without the GIL
        return list(pool.map(function, pieces, repeat(kind)))


def _join(parts: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    there = [one for one in parts if one is not None]
    return np.concatenate(there) if there else None


def _quantise_part(data: Bytes, kind: Kind) -> Quantised:
    data = np.ascontiguousarray(data)
    weights = gguf.dequantize(data, kind).reshape(len(data), -1, GROUP)
    bits = 4 if kind in _OF_FOUR_BITS else 8
    if kind not in _GRIDS:
        scales = np.abs(weights).max(axis=-1) / np.float32(_MOST)
        return Quantised(_codes(weights, scales), bits, scales)
    _, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    scales, least = _GRIDS[kind](data.reshape(len(data), -1, n_bytes))
    if least is None:
        return Quantised(_codes(weights, scales), bits, scales)
    # Code 0 is the end that is farther from 0, at most 127 steps.
    ends = np.where(least > 0, weights.max(axis=-1), least)
    scales = np.maximum(scales, (np.abs(ends) / _MOST).astype(np.float16)).astype(np.float32)
    scales = np.where(least > 0, -scales, scales)
    zeros = _codes(-ends[..., None], scales)[..., 0]
    offsets = (ends + zeros * scales).astype(np.float32)
    codes = _codes(weights - ends[..., None], scales)
    if bits == 4:
        return Quantised(codes, bits, scales, zeros.astype(np.uint8), offsets)
    return Quantised(codes - zeros[..., None], bits, scales, None, offsets)


def _codes(weights: Floats, scales: Floats) -> NDArray[np.int8]:
    """The nearest multiples of the scales; 0 where a scale is 0."""
    factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return np.rint(weights * factors[..., None]).clip(-_MOST - 1, _MOST).astype(np.int8)


# -- the grids of formats: the scale and the least weight of each group, from blocks of bytes ------------

_Grid = Callable[[Bytes], tuple[Floats, Floats | None]]


def _half(blocks: Bytes, at: int) -> Floats:
    found = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
    return found.astype(np.float32)


def _scales_alone(blocks: Bytes) -> tuple[Floats, Floats | None]:
    return _half(blocks, 0), None


def _with_least(blocks: Bytes) -> tuple[Floats, Floats | None]:
    return _half(blocks, 0), _half(blocks, 2)


def _with_exponent(blocks: Bytes) -> tuple[Floats, Floats | None]:
    return np.exp2(blocks[..., 0].astype(np.float32) - 128), None


def _of_super_blocks(blocks: Bytes) -> tuple[Floats, Floats | None]:
    rows, n_blocks, _ = blocks.shape
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = rows, n_blocks, 8
    scales = _half(blocks, 0)[..., None] * scales.reshape(shape)
    least = -_half(blocks, 2)[..., None] * least.reshape(shape)
    return scales.reshape(rows, -1), least.reshape(rows, -1)


_GRIDS: dict[Kind, _Grid] = {
    Kind.Q4_0: _scales_alone,
    Kind.Q5_0: _scales_alone,
    Kind.Q8_0: _scales_alone,
    Kind.MXFP4: _with_exponent,
    Kind.Q4_1: _with_least,
    Kind.Q5_1: _with_least,
    Kind.Q4_K: _of_super_blocks,
    Kind.Q5_K: _of_super_blocks,
}
