"""Engines whose model is computed in stages, by threads that are connected as processes are."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from serve_app.base.errors import ConfigError, EngineClosedError, EngineFailedError
from serve_app.base.sampling import SamplingParams
from serve_app.base.sharing import turns
from serve_app.base.values.answers import TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel.protocol import Address
from serve_app.engine import Engine, EngineOptions
from serve_app.engine.choice.plan import OPENVINO, Plan
from serve_app.engine.costs import profile_cache
from serve_app.kernels.llama.model import Model
from serve_app.store.builtin_model import BUILTIN_MODEL

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.base.progress import nowhere
from serve_app.engine.backends.openvino import OpenVinoBackend
from serve_app.kernels.openvino.parts import ModelPart
from serve_app.plugins.stages import replica as replica_stages
from serve_app.plugins.stages.chain import StageChain
from serve_app.plugins.stages.frames import Frame
from serve_app.plugins.stages.replica import ReplicaStage, StageSpeed
from serve_app.run.replica.place import Gang, ReplicaPlace
from serve_app.store.shared_entries import FolderValues

_OPTIONS = EngineOptions(4, 256, 1, n_batch=64, profile_limit_s=0, backend="openvino")
_HOST = "127.0.0.1"
_LIMIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of converted models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Meeting:
    """The place where stages of this process find each other."""

    def __init__(self, n_stages: int) -> None:
        self.barrier = threading.Barrier(n_stages)
        self.addresses: dict[int, Address] = {}

    def of(self, index: int, address: Address) -> list[Address]:
        self.addresses[index] = address
        self.barrier.wait(_LIMIT_S)
        return [self.addresses[i] for i in range(self.barrier.parties)]


def chains_of(n_stages: int, layers: Sequence[range | None] | None = None) -> list[StageChain]:
    """Chains whose stages are on nodes of their own, so that they use TCP."""
    meeting = Meeting(n_stages)
    return [
        StageChain(ModelPart(i, n_stages, part), f"node {i}", _HOST, partial(meeting.of, i))
        for i, part in enumerate(layers or [None] * n_stages)
    ]


def engine_of(
    chain: StageChain | None, options: EngineOptions = _OPTIONS, path: Path = BUILTIN_MODEL
) -> Engine:
    plan = profile_cache.load(options.profile_folder, "stages", Plan) or Plan(
        OPENVINO, name="stages"
    )
    return Engine(
        lambda: OpenVinoBackend(Model(path, vocab_only=True), options, plan=plan, chain=chain),
        options,
    )


@contextlib.contextmanager
def engines_of(
    chains: list[StageChain], options: EngineOptions = _OPTIONS, path: Path = BUILTIN_MODEL
) -> Iterator[list[Engine]]:
    with ThreadPoolExecutor(len(chains)) as pool:
        engines = list(pool.map(lambda chain: engine_of(chain, options, path), chains))
        try:
            yield engines
        finally:
            list(pool.map(lambda engine: engine.close(0), engines))


def started(engine: Engine, text: str, n_tokens: int) -> Future[str]:
    """The text that follows. The future fails as the request does."""
    answer: Future[str] = Future()
    parts: list[str] = []

    def sink(delta: TokenDelta) -> None:
        parts.append(delta.text)
        if delta.end is not None and delta.end.error is not None:
            answer.set_exception(delta.end.error)
        elif delta.end is not None:
            answer.set_result("".join(parts))

    sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    request = GenerationRequest(text, engine.tokenize(text), sampling)
    (outcome,) = engine.submit_to([(request, sink)])
    if isinstance(outcome, Exception):
        raise outcome
    return answer


_TEXTS = [f"The capital of {name} is" for name in ("Portugal", "France", "Italy", "Japan", "Peru")]


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """The answers of one engine that has the whole model."""
    engine = engine_of(None)
    answers = [started(engine, text, 24) for text in _TEXTS]
    try:
        return [answer.result(_LIMIT_S) for answer in answers]
    finally:
        engine.close(0)


def test_engines_in_stages_write_what_one_engine_writes(whole: list[str]) -> None:
    n_stages, layers = (
        3,
        (range(2), range(2, 5), range(5, 6)),
    )  # with which rounding changes no text
    chains = chains_of(n_stages, layers)
    with engines_of(chains) as engines:
        answers = [started(engine, text, 24) for engine in engines for text in _TEXTS]
        assert [answer.result(_LIMIT_S) for answer in answers] == whole * n_stages
        assert all(chain.counts.sent_s > 0 for chain in chains)
        vectors = [engine.embed([(5, 6, 7)]).result(_LIMIT_S) for engine in engines]
        assert all(abs(vectors[0] - vector).max() < 1e-3 for vector in vectors[1:])


def test_a_prefix_without_a_slot_stays_where_its_layers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: list[Frame] = []
    send = StageChain._send

    def noted(chain: StageChain, target: int, frame: Frame) -> None:
        frames.append(frame)
        send(chain, target, frame)

    monkeypatch.setattr(StageChain, "_send", noted)
    begun = "A prompt that is long enough to be worth a copy, if another one takes its slot"
    options = replace(_OPTIONS, n_slots=1, cache_ram_bytes=2**24)
    with engines_of(chains_of(2), options) as (engine, _):
        texts = [started(engine, text, 8).result(_LIMIT_S) for text in (begun, _TEXTS[0], begun)]
        assert texts[0] == texts[2]
        assert engine.stats().tokens.restored_tokens > 16
    copies = [frame for frame in frames if frame.operation in ("save", "restore")]
    assert {frame.operation for frame in copies} == {"save", "restore"}
    assert max(len(one.data) for frame in copies for one in frame.arrays.values()) < 100


def test_others_go_on_when_a_request_is_aborted_and_when_an_engine_ends(whole: list[str]) -> None:
    with engines_of(chains_of(2)) as engines:
        long = started(engines[0], "A long story about", 200)
        answers = [started(engine, _TEXTS[0], 24) for engine in engines]
        engines[0].abort("A long story about")
        assert [answer.result(_LIMIT_S) for answer in answers] == [whole[0]] * 2
        assert long.result(_LIMIT_S) is not None
        assert all(slot.request_id is None for slot in engines[0].stats().slots)

        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(engines[0].close, 0)
            with contextlib.suppress(EngineClosedError):
                while True:
                    started(engines[0], "Not too late yet", 1).result(_LIMIT_S)
            assert started(engines[1], _TEXTS[1], 24).result(_LIMIT_S) == whole[1]
            assert not closing.done(), "its stage computes for the other one"
            engines[1].close(0)


def test_a_chain_that_breaks_fails_all_engines_at_once() -> None:
    chains = chains_of(2)
    with engines_of(chains) as engines:
        answers = [started(engine, "Once", 230) for engine in engines]
        chains[1]._break()
        for answer in answers:
            with pytest.raises(EngineFailedError, match="chain of stages is broken"):
                answer.result(10)
        with pytest.raises(EngineFailedError):
            chains[0].check_health()


def test_a_stage_that_cannot_be_made_is_no_engine() -> None:
    chains = chains_of(9)
    try:
        with pytest.raises(ConfigError, match="too few for 9 stages"):
            engine_of(chains[0])
    finally:
        for chain in chains:
            chain.close()


def test_layers_are_divided_by_speeds_that_are_kept_and_speeds_are_kept_anew(
    whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {tmp_path / str(i): StageSpeed((0, 6), 1.0 + 2 * i, 4.0, 1.0) for i in range(2)}

    def load(folder: Path, _name: str, kind: type) -> StageSpeed | None:
        return kept[folder] if kind is StageSpeed else None

    monkeypatch.setattr(profile_cache, "load", load)
    monkeypatch.setattr(replica_stages, "shared_values", lambda: FolderValues(tmp_path))
    monkeypatch.setattr(replica_stages, "_MEASURED_S", 0.0)

    def loaded(i: int) -> tuple[ReplicaStage, Engine]:
        gang = Gang("gang", i, 2, _HOST)
        stage = ReplicaStage(ReplicaPlace("", "", "", f"node {i}", tmp_path, gang=gang), gang)
        path = (
            tmp_path / "turns" / "0-1"
        )  # one for both: no engine waits in its turn for the other stage
        options = replace(_OPTIONS, profile_folder=tmp_path / str(i), turns=path)
        return stage, stage.load(BUILTIN_MODEL, options, nowhere)

    with ThreadPoolExecutor(2) as pool:
        stages = list(pool.map(loaded, range(2)))
        answers = [started(engine, _TEXTS[0], 24) for _, engine in stages]
        assert [answer.result(_LIMIT_S) for answer in answers] == [whole[0]] * 2
        for stage, engine in stages:
            stage.check_health()
            assert engine.stats().timing.turn_s == 0
        with turns.join(tmp_path / "turns" / "0-1"):
            others = turns.current()
            assert isinstance(others, turns.Turns)
            assert all(entry.held_s > 0 for entry in others._table.entries[:2])
        list(pool.map(lambda stage: stage[1].close(0), stages))
    assert [stage.chain.counts.n_layers for stage, _ in stages] == [1, 5]
    assert not [*tmp_path.glob("stages*")], "nothing is left of the meeting"
    speeds = [
        msgspec.json.decode(file.read_bytes(), type=StageSpeed)
        for folder in kept
        for file in folder.iterdir()
    ]
    assert [speed.layers for speed in speeds] == [(0, 1), (1, 6)]
    assert all(speed.bytes_per_s > 1e6 and 0 < speed.sampled <= 1 for speed in speeds)


def test_nothing_is_measured_anew_when_layers_are_divided_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(_OPTIONS, profile_limit_s=1.0, profile_folder=tmp_path)
    with caplog.at_level(logging.INFO, "corral.engine"):
        for n_first in (2, 3):
            layers = (range(n_first), range(n_first, 6))
            with engines_of(chains_of(2, layers), options) as engines:
                assert all(engine.stats().costs.step_time for engine in engines)
            assert caplog.text.count("Measured batches") == 2


def test_a_stranger_is_refused() -> None:
    chain = StageChain(ModelPart(0, 2), "node", _HOST, lambda address: [address])
    try:
        connection = socket.create_connection((_HOST, chain._address.port), 5)
        with connection:
            connection.sendall(b"\x0c\0\0\0" + b"\x92\xa5wrong\xa4name")
            assert connection.recv(1) == b""
        assert chain.failure is None
    finally:
        chain.close()
