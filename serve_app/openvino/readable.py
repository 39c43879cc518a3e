"""Says whether OpenVINO's backend can compute a GGUF model, before anything is converted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from serve_app.errors import ConfigError
from serve_app.openvino.architectures import ARCHITECTURES
from serve_app.openvino.gguf_model import GgufModel
from serve_app.openvino.weights import is_quantised, is_rounded, n_bytes

_TENSORS = re.compile(
    r"(token_embd|output_norm|output|rope_freqs"
    r"|blk\.\d+\.(attn_norm|attn_q|attn_k|attn_v|attn_q_norm|attn_k_norm|attn_output"
    r"|ffn_norm|ffn_gate|ffn_up|ffn_down))\.(weight|bias)"
)


def unreadable(files: Sequence[Path]) -> str | None:
    """Why the model in these files cannot be computed, as the rest of a sentence; None if it can. Blocks
    for the moment that it takes to read names."""
    try:
        model = GgufModel(files)
        if model.architecture not in ARCHITECTURES:
            return f"the architecture {model.architecture} is not known"
        _ = model.rotary
    except ConfigError as error:
        return str(error)
    for tensor in model.tensors:
        if not _TENSORS.fullmatch(tensor.name):
            return f"its tensor {tensor.name} would not be used"
        if is_quantised(tensor.kind) and not _is_known(tensor.kind):
            return f"nobody has written how to read {tensor.kind.name} weights"
    return None


def converted_bytes(files: Sequence[Path]) -> int:
    """The size of the model when it is converted, at most; its vectors are left out."""
    tensors = GgufModel(files).tensors
    return sum(n_bytes(one.kind, one.n_weights) for one in tensors if one.data.ndim > 1)


def rounded(files: Sequence[Path]) -> list[str]:
    """The formats in them that are rounded to 8 bits."""
    kinds = {one.kind for one in GgufModel(files).tensors}
    return sorted(kind.name for kind in kinds if is_rounded(kind))


def _is_known(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
