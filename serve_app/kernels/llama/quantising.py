"""Writes a model's file in another format, with llama.cpp's own function."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import llama_cpp

from serve_app.base.errors import ConfigError
from serve_app.kernels.llama import library

FORMATS: dict[str, int] = {
    found[1]: getattr(llama_cpp, found[0])
    for name in dir(llama_cpp)
    if (found := re.fullmatch(r"LLAMA_FTYPE_(?:MOSTLY|ALL)_(\w+)", name))
}
"""llama.cpp's numbers, by its names without prefixes, as `Q4_0`."""


def quantise(
    source: Path, target: Path, name: str, *, threads: int = 1, alike: bool = False
) -> None:
    """Write the model of `source` to `target` in one of `FORMATS`. A source that is quantised already loses
    a second time. With `alike`, all matrices get that format, and none is kept more exact.

    llama.cpp may end the process that asks. Raises ConfigError if it cannot write that format. Any thread.
    """
    library.init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[name]
    params.nthread, params.pure, params.allow_requantize = threads, alike, True
    paths = os.fsencode(source), os.fsencode(target)
    if status := llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
        raise ConfigError(f"llama.cpp cannot make {name} of {source.name}: it returned {status}.")
