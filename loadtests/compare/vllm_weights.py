"""Converts a GGUF file to folders that vLLM reads: bf16, and w8a8. It runs in vLLM's environment.

    ENVIRONMENT/bin/python loadtests/compare/vllm_weights.py MODEL.gguf FOLDER

The library transformers reads the file. W8A8 has the form "int-quantized" of compressed-tensors: each
matrix of a layer has 8-bit integers and one scale for each row. Embeddings and norms stay BF16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": INT8 | {"strategy": "channel", "dynamic": False},
    "input_activations": INT8 | {"strategy": "token", "dynamic": True},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}


def write_bf16(model: Path, folder: Path) -> None:
    """The whole model, dequantized."""
    form = GgufConfig(dequantize=True, gguf_file=model.name)
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.bfloat16, quantization_config=form
    ).save_pretrained(folder, max_shard_size="100GB")


def write_w8a8(bf16: Path, folder: Path) -> None:
    """The model of the folder `bf16`, with its layers' matrices as 8-bit integers."""
    shutil.copytree(bf16, folder)
    tensors = load_file(bf16 / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((bf16 / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    write_bf16(source, target / "bf16")
    write_w8a8(target / "bf16", target / "w8a8")
