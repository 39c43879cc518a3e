"""Writes the header of a model in OpenVINO's format, once for each content, and proves its tokens.

Corral reads vocabulary, chat template and sizes from the headers of GGUF files, in processes that have no
weights. So such a model gets one, from its tokenizer.json and its configurations.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab

from serve_app.errors import ConfigError
from serve_app.folders import cache_folder
from serve_app.llama import library
from serve_app.llama.model import N_BYTES, N_PARAMS, Model
from serve_app.openvino.exported import proof
from serve_app.openvino.exported.files import CONFIG, GENERATION, SMALL_FILES, TOKENIZER, WEIGHTS
from serve_app.openvino.exported.hyperparameters import Hyperparameters
from serve_app.openvino.exported.vocabulary import Vocabulary, read

logger = logging.getLogger("corral.store")
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""GGUF's names for what generation_config.json recommends."""


def header_of(folder: Path, n_weight_bytes: int) -> Path:
    """A GGUF file with the vocabulary and the sizes of the model whose small files are in that folder. It
    is as long as the weights, of which it has none, and takes some megabytes on the disk. The first time
    takes seconds. Raises ConfigError for a model that cannot be served, and OSError."""
    path = cache_folder() / "openvino-headers" / f"{_key(folder, n_weight_bytes)}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _make(folder, n_weight_bytes, path)
        except ConfigError as error:
            raise ConfigError(f"The model in {folder} cannot be served: {error}.") from None
        logger.info("Wrote the header of the model in %s. This is done once.", folder)
    return path


def header_of_graph(path: Path) -> Path:
    """The same for a model that is here whole, by the path of its graph."""
    return header_of(path.parent, path.with_name(WEIGHTS).stat().st_size)


def hyperparameters_of(folder: Path) -> Hyperparameters:
    """The sizes of the model in that folder. Raises ConfigError, with the reason as the rest of a
    sentence."""
    return Hyperparameters.of(_json(folder / CONFIG))


def _key(folder: Path, n_weight_bytes: int) -> str:
    """A name for these files' content, and for what reads them."""
    digest = blake2b(f"{n_weight_bytes} {library.version()}".encode(), digest_size=16)
    digest.update(_code())
    for name in SMALL_FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


@cache
def _code() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def _make(folder: Path, n_weight_bytes: int, path: Path) -> None:
    """Whole or not at all; of several processes at once, the last one's stays, which is the same."""
    sizes = hyperparameters_of(folder)
    vocabulary = read(_json(folder / TOKENIZER), sizes.n_vocab)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        part = Path(made) / path.name
        _write(folder, sizes, vocabulary, n_weight_bytes, part)
        _prove(folder, vocabulary, part)
        part.replace(path)


def _write(
    folder: Path, sizes: Hyperparameters, vocabulary: Vocabulary, n_weight_bytes: int, path: Path
) -> None:
    generation = _json(folder / GENERATION)
    writer = GGUFWriter(path, sizes.architecture)
    try:
        writer.add_name(folder.resolve().name)
        writer.add_uint64(N_BYTES, n_weight_bytes)
        writer.add_uint64(N_PARAMS, sizes.n_params)
        for theirs, ours in _SAMPLING.items():
            if (value := generation.get(theirs)) is not None:
                getattr(writer, f"add_sampling_{ours}")(value)
        sizes.add_to(writer)
        vocabulary.add_to(writer)
        special = SpecialVocab(folder, load_merges=vocabulary.kind == "gpt2")
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    os.truncate(path, path.stat().st_size + n_weight_bytes)


def _prove(folder: Path, vocabulary: Vocabulary, path: Path) -> None:
    """Raises ConfigError unless llama.cpp's tokens are those of the tokenizer, and end where the model's
    answers do."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"it needs the package {error.name}: install corral[openvino]") from None
    model = Model(path, vocab_only=True)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    proof.check(model, tokenizer, composes=vocabulary.composes)
    ends = _json(folder / GENERATION).get("eos_token_id")
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and not model.is_eog(token):
            raise ConfigError(f"llama.cpp would not end an answer at its token {token}")


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; nothing if there is none. Raises ConfigError, with the reason as the rest of a
    sentence."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"its {path.name} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"its {path.name} is not an object")
    return found
