"""A chain of stages: each process has one of them, and an engine whose passes go through all.

An engine sends an operation to the first stage. Each stage carries out the operations of all engines in the
order in which they come, and sends the result to the next one. The last sends it to the engine. So while
one stage computes a pass of one engine, the others compute passes of others.

A chain breaks as a whole: a process that loses a connection closes all of its own.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serve_app.base.errors import DecodeCancelledError, DecodeError, EngineFailedError
from serve_app.base.sharing import turns
from serve_app.channel import protocol
from serve_app.channel.protocol import CONNECT_S, Address
from serve_app.kernels.openvino.paged.compiling import SAMPLED
from serve_app.kernels.openvino.paged.model import Operation, PagedModel, Values
from serve_app.kernels.openvino.parts import ModelPart
from serve_app.plugins.stages.frames import Frame, arrays_of, body_of, frame_of, values_of
from serve_app.plugins.stages.logits import highest_of, rows_of

logger = logging.getLogger("corral.stages")

Meet = Callable[[Address], Sequence[Address]]
"""Tells all processes of the chain where this one listens, and returns where each of them does. Blocks
until all are there. Raises EngineFailedError if they do not come."""

_LIMIT_S = 120.0
"""The longest time of an operation in all stages, with those before it, and of sending a frame."""
_LEAVE_S = 20.0
"""The longest time that a stage serves the other engines when its own has ended."""
_MOST_STRANGERS = 64
"""The most connections that have not said the secret yet."""


@dataclass(slots=True)
class StageCounts:
    """The work of a stage since its start."""

    n_stages: int
    stage: int
    """The place of the stage in the chain, from 0 on."""
    first_layer: int = 0
    n_layers: int = 0
    weights_bytes: int = 0
    cache_bytes: int = 0
    """The bytes of keys and values of these layers, for the engines of all stages."""
    computed_s: float = 0.0
    passes: int = 0
    rows: int = 0
    """The rows of all passes, which all stages compute."""
    passes_s: float = 0.0
    sampled_s: float = 0.0
    """The part of `passes_s` for rows whose logits were wanted."""
    idle_s: float = 0.0
    """The time without an operation to carry out."""
    sent_bytes: int = 0
    """The bytes of all frames to other processes."""
    sent_s: float = 0.0
    """The time that these frames took to be packed and handed to the network."""

    def count(self, frame: Frame, seconds: float) -> None:
        """Count an operation that was carried out."""
        self.computed_s += seconds
        if frame.operation == "compute":
            n_rows, n_sampled = (frame.arrays[name].shape[0] for name in ("position_ids", SAMPLED))
            self.passes += 1
            self.rows += n_rows
            self.passes_s += seconds
            self.sampled_s += seconds * n_sampled / n_rows


class StageChain:
    """The stage of this process, and the way of its engine through all stages.

    `open`, `run` and `close` are for the engine's thread, everything else for any thread.
    """

    def __init__(self, part: ModelPart, node_id: str, host: str, meet: Meet) -> None:
        """`part` says which stage this is. `host` is the address of this node, empty if all stages are on
        it."""
        self.part = part
        self.failure: EngineFailedError | None = None
        """The reason why the chain is broken, if it is."""
        self.turns: Path | None = None
        """The file of those that share this stage's cores. The stage takes turns with them, and the engine
        none: it waits for other stages, too."""
        self.counts = StageCounts(part.n_parts, part.index)
        self._node_id, self._meet = node_id, meet
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._targets: dict[int, socket.socket] = {}
        self._sending: dict[int, threading.Lock] = {}
        self._sockets: list[socket.socket] = []
        self._is_connected = threading.Event()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._number = 0
        self._n_left = 0
        self._is_closed = False
        self._is_cancelled = False
        self._stage: threading.Thread | None = None
        path, port = f"corral-{secrets.token_hex(16)}", 0
        self._listen(socket.AF_UNIX, "\0" + path)
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            port = self._listen(family, (host, 0)).getsockname()[1]
        self._address = Address(node_id, path, host, port, secrets.token_urlsafe(32))

    # -- the engine -------------------------------------------------------------------------------

    def open(self, make_model: Callable[[], PagedModel]) -> None:
        """Make the model's part, on the thread that computes it, and connect all stages. Raises
        ConfigError, and EngineFailedError."""
        made: Future[None] = Future()
        self._stage = threading.Thread(
            target=self._serve, args=(make_model, made), name="corral-stage", daemon=True
        )
        self._stage.start()
        made.result()
        addresses = self._meet(self._address)
        last = self.part.n_parts - 1
        targets = range(last) if self.part.is_last else {0, self.part.index + 1}
        try:
            for target in {*targets} - {self.part.index}:
                connection = protocol.greet(addresses[target], self._node_id, "stage")
                connection.settimeout(_LIMIT_S)
                self._sockets.append(connection)
                self._sending[target] = threading.Lock()
                self._targets[target] = connection
        except OSError as error:
            self._fail(f"Stage {target + 1} cannot be reached: {error}")
        self._is_connected.set()
        self.check_health()

    def run(self, operation: Operation, values: Values) -> Values:
        """Carry out an operation in all stages. Raises as `Layers.run`, and EngineFailedError if the chain
        is broken."""
        self._number += 1
        engine = self.part.index
        self._send(0, Frame(0, engine, self._number, operation, arrays_of(values)))
        deadline = time.monotonic() + _LIMIT_S
        result = None
        while result is None or result.number != self._number:  # but of one that was cancelled
            if self._is_cancelled and (operation == "compute" or "cancellable" in values):
                raise DecodeCancelledError("Nobody waits for what the stages compute.")
            try:
                result = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._fail(f"The stages have not answered for {_LIMIT_S:.0f} s.")
            self.check_health()
        if result.error:
            raise DecodeError(result.error)
        return rows_of(values_of(result.arrays))

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have every pass end early for the engine, or wait for passes again with False. The
        stages compute it all the same: what comes later is behind it in each of them."""
        self._is_cancelled = cancelled
        if cancelled:
            self._results.put(None)

    def close(self) -> None:
        """Serve the other engines until they leave, too, but not for long, and free the part.
        Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._stage is not None and self.failure is None:
            with suppress(EngineFailedError):
                self._send(0, Frame(0, self.part.index, 0, "leave", {}))
                self._stage.join(_LEAVE_S)
        self._break()

    def check_health(self) -> None:
        """Raises EngineFailedError if the chain is broken."""
        if self.failure is not None:
            raise EngineFailedError(*self.failure.args)

    def _fail(self, reason: str) -> None:
        if self.failure is None and not self._is_closed:
            logger.error("The chain of stages is broken: %s", reason)
            self.failure = EngineFailedError(f"The chain of stages is broken: {reason}")
        self._break()

    def _break(self) -> None:
        for connection in tuple(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()
        self._is_connected.set()
        self._frames.put(None)
        self._results.put(None)

    # -- the stage --------------------------------------------------------------------------------

    def _serve(self, make_model: Callable[[], PagedModel], made: Future[None]) -> None:
        with turns.join(self.turns):
            self._make_and_serve(make_model, made)

    def _make_and_serve(self, make_model: Callable[[], PagedModel], made: Future[None]) -> None:
        try:
            model = make_model()
        except Exception as error:
            made.set_exception(error)
            return
        made.set_result(None)
        self._is_connected.wait()  # other engines may be faster
        counts, ended = self.counts, time.monotonic()
        counts.first_layer = self.part.layers.start if self.part.layers else 0
        counts.n_layers, counts.weights_bytes = len(model.frequencies), model.weights_bytes
        counts.cache_bytes = sum(cache.nbytes for cache in model.caches.values())
        try:
            while self._n_left < self.part.n_parts and (frame := self._frames.get()) is not None:
                with turns.current().turn():
                    began = time.monotonic()
                    counts.idle_s += began - ended
                    target, result = self._carried_out(model, frame)
                ended = time.monotonic()
                counts.count(frame, ended - began)
                self._send(target, result)
        except EngineFailedError:
            pass  # `run` raises it
        except Exception as error:
            logger.exception("A stage failed.")
            self._fail(f"Stage {self.part.index + 1} failed: {error}")
        finally:
            model.close()

    def _carried_out(self, model: PagedModel, frame: Frame) -> tuple[int, Frame]:
        """The process that gets the result, and the result."""
        arrays, error = frame.arrays, ""
        if frame.operation == "leave":
            self._n_left += 1
        else:
            try:
                values = values_of(frame.arrays)
                arrays = arrays_of(highest_of(model.run(frame.operation, values), values))
            except DecodeError as failure:
                arrays, error = {}, str(failure)
        is_result = self.part.is_last or bool(error)
        stage = self.part.n_parts if is_result else frame.stage + 1
        result = Frame(stage, frame.engine, frame.number, frame.operation, arrays, error)
        return frame.engine if is_result else stage, result

    def _send(self, target: int, frame: Frame) -> None:
        """Send a frame to another process, or put it where this one looks. Raises EngineFailedError."""
        if target == self.part.index:
            self._take(frame)
            return
        self.check_health()
        began, body = time.monotonic(), protocol.frame_body(body_of(frame))
        try:
            with self._sending[target]:
                self._targets[target].sendall(body)
                self.counts.sent_bytes += len(body)
                self.counts.sent_s += time.monotonic() - began
        except OSError as error:
            self._fail(f"Stage {target + 1} takes nothing: {error}")
            self.check_health()

    def _take(self, frame: Frame) -> None:
        (self._results if frame.stage == self.part.n_parts else self._frames).put(frame)

    # -- connections from other stages ------------------------------------------------------------

    def _listen(self, family: socket.AddressFamily, address: object) -> socket.socket:
        listener = socket.socket(family)
        self._sockets.append(listener)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = listener.accept()
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Take the frames of a connection that knows the secret."""
        try:
            connection = self._check_hello(connection)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            connection.close()
            logger.warning("A connection to a stage was refused: %s", error)
            return
        finally:
            self._strangers.release()
        self._sockets.append(connection)
        try:
            while True:
                self._take(frame_of(_body(connection)))
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._fail(f"A connection from another stage ended: {error}")

    def _check_hello(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(CONNECT_S)
        if connection.family != socket.AF_UNIX:
            protocol.keep_alive(connection)
            if (tls := protocol.server_tls()) is not None:
                connection = tls.wrap_socket(connection, server_side=True)
        hello = protocol.hello(bytes(_body(connection, protocol.MOST_HELLO_BYTES)))
        if not hmac.compare_digest(hello.secret.encode(), self._address.secret.encode()):
            raise ConnectionRefusedError("it does not know the secret")
        connection.sendall(protocol.WELCOME)
        connection.settimeout(None)
        return connection


def _body(connection: socket.socket, most: int = 2**32) -> bytearray:
    """The body of the next frame. Raises EOFError where the connection ends."""
    n_bytes = protocol.length_of(_receive(connection, protocol.LENGTH_BYTES))
    if n_bytes > most:
        raise EOFError("its first frame is too long")
    return _receive(connection, n_bytes)


def _receive(connection: socket.socket, n_bytes: int) -> bytearray:
    body = bytearray(n_bytes)
    rest = memoryview(body)
    while rest:
        n = connection.recv_into(rest)
        if not n:
            raise EOFError("it is closed")
        rest = rest[n:]
    return body
