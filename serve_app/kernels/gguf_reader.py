"""Reads the header of a GGUF file, whose tensors are mapped."""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError


class GgufReader(GGUFReader):
    """Reads arrays as wholes, and passes over arrays of texts: a vocabulary takes seconds otherwise."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that has what `gguf` does not know, as a new format of weights."""
        try:
            super().__init__(path)
        except (IndexError, KeyError, ValueError) as error:
            raise ConfigError(f"gguf cannot read {path.name}: {error}") from error

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        n_values, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        dtype, types = self.gguf_scalar_to_np.get(kind), [GGUFValueType.ARRAY, kind]
        if dtype is not None:
            values = self._get(start, dtype, n_values)
            return start + values.nbytes - orig_offs, [values], [0], types
        if kind is not GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        data, end, length_at = self.data.data, start, Struct("<Q").unpack_from
        for _ in range(n_values):
            end += 8 + length_at(data, end)[0]
        return end - orig_offs, [], [], types
