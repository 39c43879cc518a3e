"""The senses that a projector is for, and whether llama.cpp can use it, by its file's metadata."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
from gguf import GGUFReader, GGUFWriter

from serve_app.base.errors import ConfigError
from serve_app.kernels.llama import library


class Senses(NamedTuple):
    """The kinds of media that a model takes."""

    sees: bool = False
    hears: bool = False


NO_SENSES = Senses()


# Steps of a half minute in encoders of Whisper's kind, and projectors that stack several of them.
_N_STEPS = 1500
_STACKING = ("ultravox", "meralion")


class ProjectorFile:
    """A projector's file, whose weights may be missing. Raises ConfigError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"The projector {path} cannot be read: {error}") from error
        has = (self._value(f"clip.has_{sense}_encoder") for sense in ("vision", "audio"))
        self.senses = Senses(*map(bool, has))

    def _value(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def _kind(self, sense: str) -> Any:
        return self._value("clip.projector_type") or self._value(f"clip.{sense}.projector_type")

    def check_counts(self) -> None:
        """Refuse, with ConfigError, a projector of which llama.cpp counts a sound's embeddings wrongly.
        It would end the whole process at the first one (`clip_n_output_tokens` in
        tools/mtmd/clip.cpp)."""
        n_stacked = self._value("clip.audio.projector.stack_factor")
        if self._kind("audio") in _STACKING and n_stacked and _N_STEPS % n_stacked:
            raise ConfigError(
                f"The projector {self._path} stacks {n_stacked} steps of a sound, of which llama.cpp "
                "counts the last ones wrongly. It would end the engine at the first sound."
            )

    def why_unusable(self, n_embd: int) -> str | None:
        """Why llama.cpp cannot use it with a model of so wide embeddings; None if nothing is known against
        it. Any thread."""
        name = self._path.name
        if self.senses == NO_SENSES:
            return f"{name} is for neither pictures nor sounds."
        for has, sense in zip(self.senses, ("vision", "audio"), strict=True):
            kind = str(self._kind(sense))
            if has and not _is_known(kind):
                return (
                    f"{name} is of the kind {kind}, which this version of llama.cpp does not know."
                )
        try:
            self.check_counts()
        except ConfigError as error:
            return str(error)
        # The last of its matrices makes embeddings, so one of its sides is their width.
        if all(n_embd not in tensor.shape for tensor in self._reader.tensors):
            return f"{name} is for another model: it makes no embeddings of {n_embd} numbers."
        return None


_UNKNOWN = b"unknown projector type"


def _is_known(kind: str) -> bool:
    """llama.cpp looks at the kind first. Its complaints are not logged: the file is made here."""
    from llama_cpp import mtmd_cpp  # whose library takes memory

    said: list[bytes] = []
    keep = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text))
    library.init()
    mtmd_cpp.mtmd_log_set(keep, ctypes.c_void_p(0))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kind.gguf")
            writer = GGUFWriter(path, "clip")
            writer.add_bool("clip.has_vision_encoder", True)
            writer.add_string("clip.projector_type", kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            params = mtmd_cpp.mtmd_context_params_default()
            params.use_gpu = False
            if pointer := mtmd_cpp.mtmd_init_from_file(os.fsencode(path), None, params):
                mtmd_cpp.mtmd_free(pointer)
    finally:
        mtmd_cpp.mtmd_log_set(library.log_callback(), ctypes.c_void_p(0))
    return _UNKNOWN not in b"".join(said)
