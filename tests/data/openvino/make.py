# mypy: ignore-errors
"""Writes the archives beside it, with OpenVINO's exporter: see README.md.

python tests/data/openvino/make.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

HERE = Path(__file__).parent
BUILTIN = HERE.parents[2] / "serve_app" / "builtin_model" / "corral-demo-q8_0.gguf"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BEGIN = "<|begin_of_text|>"
N_MERGES = 200
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROPE = {
    "qwen3": {"rope_type": "default", "rope_theta": 1e6},
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
WRITTEN = {"qwen3": ("fp16", []), "llama": ("int4", ["--group-size", "32", "--ratio", "1.0"])}
LEFT_OUT = ("openvino_tokenizer", "openvino_detokenizer", "openvino_config")


def first_merges(reader: GGUFReader) -> tuple[list[str], list[tuple[str, str]]]:
    """Single characters and the first tokens that are made of others."""
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    known = [token for token in tokens if len(token) == 1]
    merges = []
    for merge in reader.get_field("tokenizer.ggml.merges").contents():
        left, right = merge.split(" ")
        if len(merges) < N_MERGES and left in known and right in known:
            merges.append((left, right))
            known.append(left + right)
    return known, merges


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    reader = GGUFReader(BUILTIN)
    tokens, merges = first_merges(reader)
    is_llama = name == "llama"
    ids = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(BPE(ids, merges, ignore_merges=is_llama))
    made.normalizer = None if is_llama else normalizers.NFC()
    cut = Split(Regex(CUT % ("{1,3}" if is_llama else "")), behavior="isolated")
    made.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = ByteLevelDecoder()
    control = [*CONTROL, BEGIN] if is_llama else CONTROL
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in control])
    if is_llama:
        known = [(BEGIN, made.token_to_id(BEGIN))]
        made.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=known)
    made.add_tokens([AddedToken(one, normalized=False) for one in ("<think>", "</think>")])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=CONTROL[2],
        pad_token=CONTROL[0],
        bos_token=BEGIN if is_llama else None,
    )
    found.chat_template = reader.get_field("tokenizer.chat_template").contents()
    return found


def write(name: str, folder: Path) -> None:
    """A model as transformers writes it."""
    torch.manual_seed(1)
    texts = tokenizer(name)
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[name]
    config = kind(
        vocab_size=-(-len(texts) // 32) * 32,
        tie_word_embeddings=name == "qwen3",
        rope_parameters=ROPE[name],
        eos_token_id=texts.eos_token_id,
        bos_token_id=texts.bos_token_id,
        **SIZES,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for one in model.parameters():
            values = torch.randn_like(one)
            one.copy_(values * 0.2 + 1 if one.ndim == 1 else values * one.shape[1] ** -0.5)
    ends = [texts.convert_tokens_to_ids(one) for one in (CONTROL[2], CONTROL[0])]
    model.generation_config.update(eos_token_id=ends)
    if name == "qwen3":
        model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    model.save_pretrained(folder)
    texts.save_pretrained(folder)


def main(folder: Path) -> None:
    for name, (weights, options) in WRITTEN.items():
        write(name, folder / name)
        target = folder / f"{name}-{weights}"
        command = ["optimum-cli", "export", "openvino", "-m", str(folder / name)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([*command, *options, str(target)], check=True)
        with tarfile.open(HERE / f"{target.name}.tar.xz", "w:xz") as archive:
            for path in sorted(target.iterdir()):
                if not path.name.startswith(LEFT_OUT):
                    archive.add(path, path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
