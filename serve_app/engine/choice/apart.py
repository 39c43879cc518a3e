"""Calls a function in a process of its own, which gives all of its memory back."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from serve_app.base.errors import ConfigError, EngineFailedError
from serve_app.base.folders import search_path
from serve_app.channel.processes import end_with_parent

# Seconds that a call may take: to convert a large model takes the most of it.
_LIMIT_S = 3600.0
_Result = TypeVar("_Result")


def apart(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function of a module with these arguments, which msgspec can write and its annotations name.
    Raises ConfigError as the function does, and EngineFailedError if nothing came of it."""
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        path = Path(folder) / "result"
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-c", f"import {__name__} as apart; apart.main()"),
                    *(function.__module__, function.__name__, str(path)),
                ],
                input=msgspec.msgpack.encode(arguments, enc_hook=str),
                stdout=subprocess.DEVNULL,
                timeout=_LIMIT_S,
                check=False,
                env=os.environ
                | {
                    "PYTHONPATH": search_path(),
                    "GGML_NO_BACKTRACE": "1",  # one line says why llama.cpp ends the process
                },
            )
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"A measurement took more than {_LIMIT_S:.0f} s.") from None
        if done.returncode or not path.is_file():
            raise EngineFailedError(f"A measurement ended with status {done.returncode}.")
        result = msgspec.msgpack.decode(path.read_bytes(), type=_types(function)[1] | str)
    if isinstance(result, str):
        raise ConfigError(result)
    return result  # type: ignore[no-any-return]


def main() -> None:
    """Call in this process the function that the first two arguments name. The input has its arguments. The
    file that the third argument names gets the result, or the message of a ConfigError."""
    logging.basicConfig(level=logging.WARNING)
    end_with_parent()  # a server that ends needs no result
    module, name, path = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    arguments = msgspec.msgpack.decode(
        sys.stdin.buffer.read(), type=_types(function)[0], dec_hook=lambda kind, value: kind(value)
    )
    try:
        result = function(*arguments)
    except ConfigError as error:
        result = str(error)
    Path(path).write_bytes(msgspec.msgpack.encode(result))


def _types(function: Callable[..., object]) -> tuple[Any, Any]:
    """The types of all arguments, as a tuple, and of the result."""
    hints = get_type_hints(function)
    result = hints.pop("return")
    return tuple.__class_getitem__(tuple(hints.values())), result
