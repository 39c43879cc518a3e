"""Finds models that OpenVINO's GGUF reader would compute wrong, because it ignores parts of them.

The reader knows the base of the rotary embedding and nothing else of it. Found by comparing logits with
llama.cpp's; `tests/integration/openvino/test_readable.py` does so for what is left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader

_INEXACT = (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)
_BIASES = ("attn_q.bias", "attn_k.bias")


def misread(gguf: Path) -> list[str]:
    """Names of what the file has and the reader would leave out or apply wrongly. Blocks for the seconds
    that it takes to read the file's names."""
    reader = GGUFReader(gguf)
    architecture = _value(reader, "general.architecture")
    names = {tensor.name for tensor in reader.tensors}
    has = {
        "rotary frequencies of its own, as Llama 3.1 and later": "rope_freqs.weight" in names,
        "a scaled rotary embedding": _is_scaled(reader, architecture),
        "biases of queries or keys in Llama's order": architecture == "llama"
        and any(name.endswith(_BIASES) for name in names),
    }
    return [what for what, is_so in has.items() if is_so]


def inexact(gguf: Path) -> list[str]:
    """The formats in it whose offsets the reader rounds: weights are less exact than in the file."""
    kinds = {tensor.tensor_type for tensor in GGUFReader(gguf).tensors}
    return [kind.name for kind in _INEXACT if kind in kinds]


def _is_scaled(reader: GGUFReader, architecture: str) -> bool:
    """Whether llama.cpp would divide positions: by a factor, unless the type is `none`."""
    prefix = f"{architecture}.rope"
    if _value(reader, f"{prefix}.scaling.type") == "none":
        return False
    factor = _value(reader, f"{prefix}.scaling.factor") or _value(reader, f"{prefix}.scale_linear")
    return factor not in (None, 0.0, 1.0)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
