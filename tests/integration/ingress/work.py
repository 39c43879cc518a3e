"""What the tests' workers do."""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn

from serve_app.errors import InvalidRequestError
from serve_app.ingress.workers.worker import Models


def pid(models: Models, body: bytes) -> int:
    return os.getpid()


def niceness(models: Models, body: bytes) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def count_tokens(models: Models, body: bytes) -> int:
    (model,) = models.values()
    return len(model.tokenizer.encode(body.decode()))


def refuse(models: Models, body: bytes) -> NoReturn:
    raise InvalidRequestError("No.", "prompt")


def fail(models: Models, body: bytes) -> NoReturn:
    raise ValueError("a secret")


def crash(models: Models, body: bytes) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_once(models: Models, body: bytes) -> str:
    """The body is the path of a file that remembers the first time."""
    if not os.path.exists(body):  # noqa: PTH110
        os.close(os.open(body, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGSEGV)
    return "alive"


def spin(models: Models, body: bytes) -> NoReturn:
    while True:
        pass


def wait_for_ever(models: Models, body: bytes) -> None:
    signal.pause()


def take_memory(models: Models, body: bytes) -> int:
    return len(bytearray(2**30))


def stack_limit(models: Models, body: bytes) -> int:
    return resource.getrlimit(resource.RLIMIT_STACK)[0]
