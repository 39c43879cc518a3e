"""The process that hears speech by Whisper, and the ingress's side of it.

    python -m serve_app.plugins.whisper FD MODEL THREADS

FD is a socket to the ingress. The process says that it has the model, and then answers orders, one after
the other, until the ingress is gone.

The library hears half a minute at once, which takes seconds. So the ingress stops the process (SIGSTOP)
while others that share its cores have their turns.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from serve_app.apis.audio.hearing import Heard, HeardSegment, HeardWord, HearingOrder
from serve_app.base.errors import (
    ConfigError,
    CorralError,
    EngineUnavailableError,
    InvalidRequestError,
)
from serve_app.base.sharing.pacing import compute_in_turns
from serve_app.base.values.media import Sound
from serve_app.channel import processes
from serve_app.config.schema import WhisperConfig
from serve_app.config.serve_options import RayServeOptions
from serve_app.run.placement.pinning import shared_cores
from serve_app.server.workers import wire
from serve_app.server.workers.fair_semaphore import FairSemaphore
from serve_app.server.workers.pool import NICENESS

logger = logging.getLogger("corral.ingress")

_BEAMS = 5
"""faster-whisper's and OpenAI's own number of candidates."""


_ORDERS = msgspec.msgpack.Decoder(HearingOrder)


class WhisperProcess:
    """Whisper's process, which is started by the first order and ends when nobody has asked it for long.
    Event loop only. Windows are heard one after the other, those of different clients in turn."""

    def __init__(self, settings: WhisperConfig) -> None:
        self.id, self._settings = settings.id, settings
        self._path: Path | None = None
        self._threads = settings.threads or 0
        if settings.threads is None:
            self._threads, self._path = shared_cores()
        self._turns = FairSemaphore(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ending: asyncio.TimerHandle | None = None

    async def hear(self, client: str, order: HearingOrder, sound: Sound) -> Heard:
        """The speech of a window. A window that was begun is heard to its end, even if nobody waits for it
        any more. Raises CorralError."""
        await self._turns.enter(client)
        hearing = asyncio.create_task(self._hear(order, sound))

        def end(_: asyncio.Task[wire.Outcome]) -> None:
            self._turns.leave(client)
            if not hearing.cancelled():
                hearing.exception()  # or asyncio would log what nobody waits for

        hearing.add_done_callback(end)
        outcome = await asyncio.shield(hearing)
        if isinstance(outcome, CorralError):
            raise outcome
        heard: Heard = outcome.value
        return heard

    async def _hear(self, order: HearingOrder, sound: Sound) -> wire.Outcome:
        """Raises CorralError."""
        if self._ending is not None:
            self._ending.cancel()
        try:
            if self._process is None:
                await self._start()
            return await self._answer(order, sound)
        except (EOFError, ConnectionError, msgspec.MsgspecError) as error:
            self.close()
            raise EngineUnavailableError("The process that hears files was lost.") from error
        finally:
            loop, keep_alive_s = asyncio.get_running_loop(), self._settings.keep_alive
            self._ending = loop.call_later(keep_alive_s, self.close)

    async def _answer(self, order: HearingOrder, sound: Sound) -> wire.Outcome:
        """Raises EOFError, also for a process that hangs."""

        async def ask() -> wire.Outcome:
            await wire.send(self._writer, order, [sound.samples])
            return await wire.receive_outcome(self._reader, Heard)

        assert self._process is not None
        answer, timeout_s = asyncio.create_task(ask()), RayServeOptions().health_check_timeout_s
        if self._path is not None:  # it looks idle while others have their turns
            timeout_s *= processes.BUSY_TIMES
        done = threading.Event()
        computing = asyncio.create_task(
            asyncio.to_thread(compute_in_turns, self._process.send_signal, self._path, done.wait)
        )
        try:
            if not await processes.answers(answer, self._process.pid, timeout_s):
                answer.cancel()
                raise EOFError
            return await answer
        finally:
            done.set()
            await computing

    async def _start(self) -> None:
        """Raises CorralError, EOFError."""
        self._process, own = _start_process(self._settings.model, self._threads)
        self._reader, self._writer = await asyncio.open_connection(sock=own)
        outcome = await wire.receive_outcome(self._reader, None)
        if isinstance(outcome, CorralError):
            self.close()
            raise outcome

    def close(self) -> None:
        """End the process now. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._writer.close()
        if self._ending is not None:
            self._ending.cancel()


def _start_process(name: str, n_threads: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process for the model of that name, and the socket to it."""
    own, theirs = socket.socketpair()
    with theirs:
        fd, threads = theirs.fileno(), str(n_threads)
        command = [sys.executable, "-P", "-m", __name__, str(fd), name, threads]
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        return subprocess.Popen(command, pass_fds=[fd], env=environment), own


def _open_whisper(name: str, threads: int) -> Any:
    """Raises ConfigError."""
    try:
        library = importlib.import_module("faster_whisper")
    except ModuleNotFoundError as error:
        raise ConfigError(f"ingress.whisper needs {error.name}: install corral[whisper]") from None
    try:
        return library.WhisperModel(name, "cpu", compute_type="int8", cpu_threads=threads)
    except Exception as error:  # of the library's own kinds
        raise ConfigError(f"ingress.whisper.model: {name} cannot be had: {error}") from None


def _heard(model: Any, order: HearingOrder, data: bytes) -> Heard:
    """Raises InvalidRequestError, and what the library raises."""
    if order.language is not None and order.language not in model.supported_languages:
        raise InvalidRequestError(
            f"The model knows no language {order.language!r}. Send a code such as en.", "language"
        )
    segments, info = model.transcribe(
        np.frombuffer(data, np.float32),
        language=order.language,
        task="translate" if order.translates else "transcribe",
        initial_prompt=order.prompt,
        beam_size=_BEAMS,
        temperature=order.temperature or [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        condition_on_previous_text=False,
        word_timestamps=order.with_words,
        vad_filter=False,  # windows without speech do not come here
    )
    return Heard(info.language, [_segment(segment) for segment in segments])


def _segment(segment: Any) -> HeardSegment:
    words = [
        HeardWord(word.word.strip(), float(word.start), float(word.end))
        for word in segment.words or ()
    ]
    return HeardSegment(
        float(segment.start),
        float(segment.end),
        segment.text.strip(),
        list(segment.tokens),
        float(segment.avg_logprob),
        float(segment.no_speech_prob),
        words,
    )


def main(fd: int, name: str, threads: int) -> None:
    """Hear what comes until the ingress is gone."""
    processes.end_with_parent()
    os.nice(NICENESS)
    with socket.socket(fileno=fd) as connection, suppress(EOFError, ConnectionError):
        try:
            model = _open_whisper(name, threads)
        except CorralError as error:
            connection.sendall(wire.packed_outcome(error))
            return
        connection.sendall(wire.packed_outcome(wire.WorkResult(None)))
        while True:
            order = _ORDERS.decode(wire.receive(connection))
            data = wire.receive_bytes(connection, order.n_bytes)
            outcome: wire.Outcome
            try:
                outcome = wire.WorkResult(_heard(model, order, data))
            except CorralError as error:
                outcome = error
            except Exception:
                logger.exception("A window could not be heard")
                outcome = CorralError("The server failed to hear the file.")
            connection.sendall(wire.packed_outcome(outcome))


if __name__ == "__main__":
    from serve_app.plugins import whisper as recognizer  # the module that the ingress imports, too

    recognizer.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
