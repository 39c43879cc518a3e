"""One LoRA adapter, loaded beside its model."""

from __future__ import annotations

import ctypes
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llama_cpp

from serve_app.errors import ConfigError
from serve_app.llama import library
from serve_app.llama.model import Model

_READ_BYTES = 2**20


class Adapter:
    """A low-rank change of a model's weights, from a GGUF file. Immutable; freed with the model.

    To be loaded before the contexts that use it: llama.cpp makes their graphs as large as the adapters that
    the model has then. Raises ConfigError if the file is missing, damaged, or for another model.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.model = model  # llama.cpp frees the adapter with it
        if not self.path.is_file():
            raise ConfigError(f"There is no adapter file at {self.path}.")
        with library.captured() as lines:
            found = llama_cpp.llama_adapter_lora_init(model.pointer, os.fsencode(self.path))
        if not found:
            reason = f": {lines[-1]}" if lines else "."
            raise ConfigError(
                f"llama.cpp cannot load the adapter {self.path} for {model.path.name}{reason}"
            )
        if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(found):
            raise ConfigError(
                f"The adapter {self.path} is of a kind that begins in the middle of a prompt (aLoRA), "
                "which Corral does not have."
            )
        self.pointer: Any = found
        """llama.cpp's, as ctypes has it."""
        self.address = ctypes.cast(found, ctypes.c_void_p).value or 0
        """What tells the pointer from others."""
        self.n_bytes = self.path.stat().st_size
        """Bytes of its file: nearly all of them are tensors."""
        self.fingerprint = _digest(self.path)
        """Tells its content from other adapters'."""


def _digest(path: Path) -> bytes:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.digest()
