"""Writes the header of a model in OpenVINO's format, once for each content, and proves its tokens.

Corral reads vocabulary, chat template and sizes from the headers of GGUF files, in processes that have no
weights. So such a model gets one, from its tokenizer.json and its configurations.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab

from serve_app.errors import ConfigError
from serve_app.folders import cache_folder
from serve_app.llama import library
from serve_app.llama.model import N_BYTES, N_PARAMS, Model
from serve_app.locks import FolderLocks
from serve_app.openvino.exported import files as exported
from serve_app.openvino.exported.hyperparameters import Hyperparameters
from serve_app.openvino.exported.vocabulary import TokenizerVocabulary, check_tokens, read

logger = logging.getLogger("corral.store")
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""GGUF's names for what generation_config.json recommends."""


def vocabulary_file(path: Path) -> Path:
    """The file that has the vocabulary of the model at that path: its header if it is a graph, otherwise
    the model's own. Raises ConfigError."""
    return header_of_graph(path) if exported.is_graph(path) else path


def header_of(folder: Path, n_weight_bytes: int) -> Path:
    """A GGUF file with the vocabulary and the sizes of the model whose small files are in that folder. It
    is as long as the weights, of which it has none, and takes some megabytes on the disk. The first time
    takes seconds. Raises ConfigError."""
    headers = cache_folder() / "openvino-headers"
    try:
        small = (folder / name for name in exported.SMALL_FILES)
        # Read once, as a header is made of what its name tells.
        contents = {file.name: file.read_bytes() for file in small if file.is_file()}
        path = headers / f"{_key(contents, n_weight_bytes)}.gguf"
        if not path.is_file():
            with FolderLocks(headers / ".locks").alone(path.stem, wait=True):
                if not path.is_file():  # nobody else has made it meanwhile
                    _make(contents, n_weight_bytes, path)
                    logger.info("Wrote the header of the model in %s. This is done once.", folder)
    except ConfigError as error:
        raise ConfigError(f"The model in {folder} cannot be served: {error}.") from None
    except OSError as error:
        raise ConfigError(
            f"The header of the model in {folder} cannot be made in {headers}: {error}."
        ) from error
    return path


def header_of_graph(path: Path) -> Path:
    """The header of a model that is here whole, by the path of its graph."""
    try:
        n_bytes = path.with_name(exported.WEIGHTS).stat().st_size
    except OSError as error:
        raise ConfigError(f"The model in {path.parent} has no weights: {error}.") from None
    return header_of(path.parent, n_bytes)


def hyperparameters_of(folder: Path) -> Hyperparameters:
    """The sizes of the model there. Raises ConfigError, with the reason as the rest of a sentence."""
    return Hyperparameters.of(_json(folder / exported.CONFIG))


def _key(contents: Mapping[str, bytes], n_weight_bytes: int) -> str:
    digest = blake2b(f"{n_weight_bytes} {library.version()}".encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for name, content in contents.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _make(contents: Mapping[str, bytes], n_weight_bytes: int, path: Path) -> None:
    """Whole or not at all. One caller at a time: what another one left when it was killed is deleted."""
    folder = path.with_suffix(".part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        part = folder / path.name
        _fill(folder, n_weight_bytes, part)
        with part.open("rb") as file:  # which is not empty after a power cut then
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, n_weight_bytes: int, path: Path) -> None:
    """Write the header and prove it. Raises ConfigError with the rest of a sentence, and OSError."""
    for name in (exported.GENERATION, exported.TOKENIZER_CONFIG):
        _json(folder / name)
    sizes = hyperparameters_of(folder)
    vocabulary = read(_json(folder / exported.TOKENIZER), sizes.n_vocab)
    with exported.trusted("one of its files"):
        _write(folder, sizes, vocabulary, n_weight_bytes, path)
        _prove(folder, vocabulary, path)


def _write(
    folder: Path,
    sizes: Hyperparameters,
    vocabulary: TokenizerVocabulary,
    n_weight_bytes: int,
    path: Path,
) -> None:
    generation = _json(folder / exported.GENERATION)
    writer = GGUFWriter(path, sizes.architecture)
    try:
        writer.add_uint64(N_BYTES, n_weight_bytes)
        writer.add_uint64(N_PARAMS, sizes.n_params)
        for theirs, ours in _SAMPLING.items():
            if (value := generation.get(theirs)) is not None:
                getattr(writer, f"add_sampling_{ours}")(value)
        sizes.add_to(writer)
        vocabulary.add_to(writer)
        special = SpecialVocab(folder, load_merges=vocabulary.kind == "gpt2", n_vocab=sizes.n_vocab)
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    os.truncate(path, path.stat().st_size + n_weight_bytes)


def _prove(folder: Path, vocabulary: TokenizerVocabulary, path: Path) -> None:
    """Raises ConfigError unless llama.cpp's tokens are the tokenizer's, and end where answers do."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"it needs the package {error.name}: install corral[openvino]") from None
    model = Model(path, vocab_only=True)
    tokenizer = Tokenizer.from_file(str(folder / exported.TOKENIZER))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_tokens(model, tokenizer, composes=vocabulary.composes)
    ends = _json(folder / exported.GENERATION).get("eos_token_id")
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and token not in model.eog_tokens:
            raise ConfigError(f"llama.cpp would not end an answer at its token {token}")


def _json(path: Path) -> dict[str, Any]:
    """The object in a file, empty without one. Raises ConfigError with the rest of a sentence."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"its {path.name} is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ConfigError(f"its {path.name} is not an object")
    return document
