"""What the ingress makes of the bytes that a worker sends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute

from serve_app.apis.api import ROUTERS
from serve_app.apis.batches.objects import BatchRequest, LineError
from serve_app.apis.batches.preparation import BatchLine
from serve_app.apis.responses.preparation import After, PreparedResponse
from serve_app.base.errors import (
    CorralError,
    InvalidRequestError,
    PicturesWantedError,
    PromptTooLongError,
    QueueFullError,
)
from serve_app.base.values.adapters import AdapterUse
from serve_app.base.values.media import Medium, Picture, Sound
from serve_app.channel.protocol import frame_body
from serve_app.config.defaults import ModelDefaults
from serve_app.kernels.llama.vision.senses import Senses
from serve_app.server.http.dependencies import PreparedBody
from serve_app.server.model_registry import ModelFile
from serve_app.server.workers import wire
from serve_app.server.workers.worker import Start

FILES = (
    ModelFile("a", 512, "a.gguf"),
    ModelFile(
        "b",
        4096,
        "b.gguf",
        "mean",
        defaults=ModelDefaults(
            {"temperature": 0.5, "dry_sequence_breakers": ("a", "b")}, max_tokens=3
        ),
        aliases=("c", "*"),
        tags=("chat",),
        adapters={3: AdapterUse("poet", 0.5, "f00")},
        senses=Senses(sees=True, hears=True),
        is_on_demand=True,
    ),
)


@pytest.mark.parametrize("file", FILES)
def test_workers_are_told_all_of_a_model(file: ModelFile) -> None:
    start = Start((file,), ("module",), "module:function", keeps_texts=False)
    data = msgspec.msgpack.encode(start)
    arrived = msgspec.msgpack.decode(data, type=Start)
    assert msgspec.msgpack.encode(arrived) == data
    assert type(arrived.models[0]) is ModelFile
    assert type(arrived.models[0].senses) is Senses


async def received(data: bytes, kind: Any) -> wire.Outcome:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await wire.receive_outcome(reader, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        (b"{}", bytes),
        ((Picture.of(b"rgb", 1, 1), Sound.of(b"four")), tuple[Medium, ...]),
        (After("resp_1", ["msg_1"]), PreparedResponse | After),
        (
            [BatchLine(1, "q", 2, 3, b"p"), BatchLine(2, error=LineError(code="a", message="b"))],
            list[BatchLine],
        ),
        (
            BatchRequest(
                input_file_id="file-1", endpoint="/v1/completions", completion_window="1h"
            ),
            BatchRequest,
        ),
    ],
)
async def test_results_arrive_as_they_were(value: Any, kind: Any) -> None:
    data = wire.packed_outcome(wire.WorkResult(value, ["x"]))
    assert await received(data, kind) == wire.WorkResult(value, ["x"])


def test_an_integer_that_has_no_room_is_the_client_s_fault() -> None:
    for number in (-(2**63), 2**64 - 1):
        wire.packed_outcome(wire.WorkResult(number))
    for number in (-(2**63) - 1, 2**64):
        with pytest.raises(InvalidRequestError, match="more than 64 bits"):
            wire.packed_outcome(wire.WorkResult({"maximum": number}))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("wrong", "temperature"),
        PromptTooLongError(9, 8, None, False),
        QueueFullError("full", 3),
        PicturesWantedError("messages", [("http://a", "messages[0]")]),
        CorralError("broken"),
    ],
)
async def test_errors_arrive_as_they_were(error: CorralError) -> None:
    arrived = await received(wire.packed_outcome(error), bytes)
    assert isinstance(arrived, CorralError)
    assert type(arrived) is type(error)
    assert (arrived.message, arrived.param, arrived.details, arrived.retry_after_s) == (
        error.message,
        error.param,
        error.details,
        error.retry_after_s,
    )


async def test_orders_arrive_as_they_were_and_their_bodies_behind_them() -> None:
    adapters = {"m": {0: AdapterUse("a", 0.5), 3: AdapterUse("b", 1.0, "v")}}
    order = wire.WorkOrder("module:function", 7, adapters, (("http://a/", 3),))
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        await wire.send(writer, order, [b"bo", b"dy", b"png"])
        assert await asyncio.to_thread(wire.receive_order, theirs) == order
        assert await asyncio.to_thread(wire.receive_bytes, theirs, 7) == b"bodypng"
        writer.close()
        with pytest.raises(EOFError):
            await asyncio.to_thread(wire.receive_order, theirs)


class Exploit:
    """An object whose pickle runs a program where it is read."""

    def __reduce__(self) -> Any:
        return os.abort, ()


_RECEIVES = """
import socket, sys
from serve_app.server.workers import wire
print(wire.receive_bytes(socket.socket(fileno=int(sys.argv[1])), 6))
"""


def test_a_process_that_was_stopped_receives_the_rest() -> None:
    """recv(2) with MSG_WAITALL returns what is there then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _RECEIVES, str(fd)],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ours.sendall(b"bod")
        while _unread(theirs):
            pass
        process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T":
            pass
        process.send_signal(signal.SIGCONT)
        ours.sendall(b"png")
        assert process.communicate()[0] == b"b'bodpng'\n"


def _unread(connection: socket.socket) -> int:
    """The bytes that nobody has read yet."""
    n = array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, n)
    return n[0]


@pytest.mark.parametrize(
    "data",
    [
        frame_body(pickle.dumps(Exploit())),
        frame_body(msgspec.msgpack.encode([pickle.dumps(Exploit()), [], None])),
        frame_body(msgspec.msgpack.encode([{"model": "x"}, [], None])),
        frame_body(msgspec.msgpack.encode([None, [], ["OSError", ["x"]]])),
        frame_body(msgspec.msgpack.encode([None, [], ["InvalidRequestError", []]])),
        frame_body(b""),
    ],
)
async def test_a_worker_that_was_taken_over_makes_nothing_run(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        await received(data, PreparedResponse | After)


@pytest.mark.parametrize("length", [0, 5, 12])
async def test_a_message_that_ends_early_is_the_end(length: int) -> None:
    with pytest.raises(EOFError):
        await received(frame_body(b"0123456789")[:length], bytes)


def test_the_results_of_all_routes_have_types_that_can_be_read() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    dependencies = [one.call for route in routes for one in route.dependant.dependencies]
    works = [call.prepare for call in dependencies if isinstance(call, PreparedBody)]
    assert len(works) > 10
    for work in works:
        kind = wire.result_type(work)
        msgspec.msgpack.Decoder(kind, dec_hook=lambda *_: None)
