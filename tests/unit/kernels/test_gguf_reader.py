"""GGUF files with arrays, and with what nobody knows yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from serve_app.base.errors import ConfigError
from serve_app.kernels.gguf_reader import GgufReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["a", "bc", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_name("after them")
    writer.add_tensor("weights", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_arrays_of_texts_are_passed_over(path: Path) -> None:
    reader = GgufReader(path)
    assert reader.fields["tokenizer.ggml.tokens"].parts[3:] == []
    assert reader.fields["numbers"].contents() == [1, 2, 3]
    assert reader.fields["general.name"].contents() == "after them"
    assert reader.tensors[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_unknown_format_of_weights_is_an_error(path: Path) -> None:
    GGUFReader(path, "r+").tensors[0].field.parts[4][0] = 999
    with pytest.raises(ConfigError, match=r"gguf cannot read model\.gguf: .*999"):
        GgufReader(path)
