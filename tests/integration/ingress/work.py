"""What the tests' workers do."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

from serve_app.apis.embeddings import preparation
from serve_app.apis.openai.preparation import chat
from serve_app.base.errors import InvalidRequestError
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.media import decoder
from serve_app.server.model_registry import Models, find

_kept: list[bytes] = []


def pid(models: Models, body: bytes) -> int:
    return os.getpid()


def policy(models: Models, body: bytes) -> int:
    return os.sched_getscheduler(0)


def niceness(models: Models, body: bytes) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def slice_ns(models: Models, body: bytes) -> int:
    fields = re.findall(r"^se\.slice\s*:\s*(\d+)", Path("/proc/self/sched").read_text(), re.M)
    return int(fields[0])


def spend_time(models: Models, body: bytes) -> None:
    """As the kernel ends what has taken all its time; until then it answers no signal."""
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


def count_tokens_of_chat(models: Models, request: ChatCompletionRequest) -> int:
    return len(chat(models, request).prompt)


def write_vectors(models: Models, body: bytes) -> bytes:
    return preparation.openai_answer(models, body)


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


def policy_after_a_crash(models: Models, body: bytes) -> int:
    crash_once(models, body)
    return policy(models, body)


def spin(models: Models, body: bytes) -> NoReturn:
    while True:
        pass


def wait_for_ever(models: Models, body: bytes) -> None:
    signal.pause()


def take_memory(models: Models, body: bytes) -> int:
    return len(bytearray(2**30))


def answer_at_length(models: Models, body: bytes) -> bytes:
    # A process that has freed much has room for less, as it does not give all back.
    return bytes(2**29)


def answer_with_a_socket(models: Models, body: bytes) -> socket.socket:
    return socket.socket()


def keep_memory(models: Models, body: bytes) -> None:
    """Nearly all that a body without bytes may have."""
    _kept.append(bytes(28 * 2**20))


def size(models: Models, body: bytes) -> int:
    return len(body)


def stack_limit(models: Models, body: bytes) -> int:
    return resource.getrlimit(resource.RLIMIT_STACK)[0]


def see(models: Models, body: bytes) -> tuple[int, int, int]:
    """Width, height and bytes of the picture that the body is."""
    found = decoder.decode_picture(body, "it", "messages")
    return found.width, found.height, len(found.pixels)


def find_model(models: Models, body: bytes) -> str:
    return find(models, body.decode() or None).id


def names(models: Models, body: bytes) -> list[str]:
    return list(models)


def sleep(models: Models, body: bytes) -> None:
    time.sleep(float(body))


def tokens_of(models: Models, body: bytes) -> int:
    """How many tokens a text has in the vocabulary of the model of this name."""
    return len(find(models, body.decode()).tokenizer.encode("The quick brown fox."))
