"""Which kernels a start chooses, and when it measures. What is measured is scripted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError, EngineFailedError
from serve_app.base.formats import BackendName, Quantization
from serve_app.base.progress import Stage
from serve_app.engine.backends import opening
from serve_app.engine.choice import choose as choosing
from serve_app.engine.choice.choose import choose
from serve_app.engine.choice.kernels import MODE
from serve_app.engine.choice.plan import (
    AS_STORED,
    OPENVINO,
    OPENVINO_W8A8,
    REPACKED,
    CachePlan,
    Kernels,
    Plan,
)
from serve_app.engine.costs.cost_model import Profile
from serve_app.kernels.llama.model import fingerprint_of
from serve_app.kernels.openvino import convert

OPTIONS = EngineOptions(n_slots=4, n_ctx_slot=64, threads=1, backend="auto")
F16, Q4_0, Q4_K_M, BF16 = 1, 2, 15, 32
"""Numbers of formats in files. llama.cpp has two layouts of Q4_K_M."""


def profile(seconds: float) -> Profile:
    return Profile({1: seconds, 4: 2 * seconds}, {16: seconds})


class Machine:
    """The times that a measurement finds, and what was measured."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, list[Kernels]]] = []
        """The file and the candidates of each measurement."""
        self.share = 1.0
        self.profiles = {
            REPACKED: profile(2.0),
            AS_STORED: profile(3.0),
            OPENVINO: profile(1.0),
            OPENVINO_W8A8: profile(1.0),
        }
        self.failures: dict[bool, Exception] = {}
        """What ends a measurement with OpenVINO, and one without."""
        self.architecture, self.format = "llama", Q4_0
        self.unreadable, self.converted_bytes, self.conversion_s = "", 8, 0.0
        self.rounded_bytes = 12
        self.converted_with: Quantization = "auto"
        self.converted = threading.Event()
        """Whether the model was converted beside requests."""

    def check(self, *_: object, quantization: Quantization = "none") -> SimpleNamespace:
        if self.unreadable:
            raise ConfigError(self.unreadable)
        n_bytes = self.converted_bytes if quantization == "none" else self.rounded_bytes
        return SimpleNamespace(converted_bytes=lambda: n_bytes)

    def apart(
        self, _: object, path: Path, __: object, kernels: list[Kernels], limit_s: float
    ) -> list[Profile]:
        assert limit_s == 6.0 * len(kernels)
        self.measured.append((path.name, kernels))
        if failure := self.failures.get(OPENVINO in kernels):
            raise failure
        return [replace(self.profiles[each], share=self.share) for each in kernels]

    @contextmanager
    def converted_slice(self, *_: object) -> Iterator[tuple[Path, float, float]]:
        yield Path("slice.gguf"), 1 / 8, self.conversion_s

    def convert(self, *_: object, quantization: Quantization) -> Path:
        self.converted_with = quantization
        self.converted.set()
        return Path("converted")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "apart", made.apart)
    monkeypatch.setattr(convert, "versions", lambda: "openvino 1")
    monkeypatch.setattr(choosing, "_LEAST_BYTES", 4)
    monkeypatch.setattr(choosing, "converted_slice", made.converted_slice)
    monkeypatch.setattr(convert, "read_model", made.check)
    monkeypatch.setattr(convert, "converted_of", made.convert)

    def open_model(path: Path, **_: object) -> SimpleNamespace:
        return SimpleNamespace(
            path=path,
            files=[path],
            fingerprint=lambda: b"a" * 32,
            is_recurrent=False,
            architecture=made.architecture,
            is_causal=made.architecture == "llama",
            pooling_with=lambda configured: configured or "mean",
            meta=lambda _name: str(made.format),
        )

    monkeypatch.setattr(choosing, "Model", open_model)
    monkeypatch.setattr(opening, "Model", open_model)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return replace(OPTIONS, profile_folder=tmp_path / "profiles")


def test_the_faster_one_is_remembered(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    stages: list[Stage] = []
    first = choose(model, options, stages.append)
    assert first.kernels == OPENVINO
    assert str(first) == f"OpenVINO: {first.why}"
    assert first.why.startswith("a request with 1 and 4 at once takes ")
    assert " s with llama.cpp, weights repacked; " in first.why
    assert stages == [Stage("measuring", limit_s=18.0)]
    assert choose(model, options) == first
    assert machine.measured == [("slice.gguf", [REPACKED, OPENVINO, OPENVINO_W8A8])]


@pytest.mark.parametrize(
    "change",
    [
        {"n_slots": 2},
        {"threads": 2},
        {"n_ctx_slot": 128},
        {"profile_limit_s": 20.0},
        {"cache_type_k": "bf16", "cache_type_v": "bf16"},
    ],
    ids=str,
)
def test_other_conditions_are_measured_anew(
    machine: Machine, model: Path, options: EngineOptions, change: dict[str, Any]
) -> None:
    choose(model, options)
    machine.profiles |= dict.fromkeys((OPENVINO, OPENVINO_W8A8), profile(3.0))
    assert choose(model, replace(options, **change)).kernels == REPACKED
    assert choose(model, options).kernels == OPENVINO


def test_another_file_is_measured_anew(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    choose(model, options)
    model.write_bytes(b"other weights")
    choose(model, options)
    assert len(machine.measured) == 2


def test_beside_other_programs_llama_cpp_computes_until_the_next_start(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.share = 0.5
    plan = choose(model, options)
    assert plan.kernels == REPACKED
    assert "the next start measures again" in plan.why
    machine.share = 1.0
    assert choose(model, options).kernels == OPENVINO


def test_a_model_that_openvino_refuses_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.unreadable = "the architecture mamba is not known"
    plan = choose(model, options)
    assert (plan.kernels, plan.why) == (REPACKED, "the architecture mamba is not known")
    assert not machine.measured
    machine.unreadable = ""
    assert choose(model, options).kernels == OPENVINO


def test_a_model_that_memory_has_no_room_for_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    plan = choose(model, replace(options, memory_bytes=machine.converted_bytes - 1))
    assert plan.kernels == REPACKED
    assert "GiB of memory" in plan.why
    assert not machine.measured


def test_encoders_are_openvinos_without_a_measurement(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.architecture = "bert"
    plan = choose(model, options)
    assert (plan.kernels, plan.why) == (OPENVINO, "OpenVINO is the faster for encoders")
    assert not machine.measured


def test_an_encoder_that_openvino_lacks_is_llama_cpps(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.architecture, machine.format = "jina-bert-v2", Q4_K_M
    plan = choose(model, options)
    assert plan.kernels == REPACKED
    assert "attention to tokens behind" in plan.why
    assert not machine.measured


def test_streams_wait_for_a_slice_for_its_part_of_the_time(
    machine: Machine, model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def request_s(_: Profile, sized: EngineOptions, *__: object) -> float:
        bounds.append(sized.max_stall_ms)
        return 1.0

    monkeypatch.setattr(choosing, "request_s", request_s)
    plan = choose(model, replace(options, max_stall_ms=250))
    assert "takes 8.00 and 8.00 s with" in plan.why, "a request to the whole model"
    choose(model, replace(options, max_stall_ms=math.inf))
    assert bounds == [250 / 8] * 6 + [math.inf] * 6


def test_a_small_model_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    model.write_bytes(b"www")
    plan = choose(model, options)
    assert (plan.kernels, plan.why) == (REPACKED, "the model is small")
    assert not machine.measured


@pytest.mark.parametrize(
    ("conversion_s", "is_converted", "memory_bytes", "kernels", "reason"),
    [
        (31.0, False, None, REPACKED, "takes about 31 s: that is done"),
        (31.0, False, 20, REPACKED, "takes about 31 s and much memory"),
        (31.0, True, None, OPENVINO, "weights repacked"),
        (29.0, False, None, OPENVINO, "weights repacked"),
    ],
)
@pytest.mark.parametrize("faster", [OPENVINO, OPENVINO_W8A8])
def test_nobody_waits_for_a_long_conversion(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    monkeypatch: pytest.MonkeyPatch,
    conversion_s: float,
    is_converted: bool,
    memory_bytes: int | None,
    kernels: Kernels,
    reason: str,
    faster: Kernels,
) -> None:
    machine.conversion_s, machine.profiles[faster] = conversion_s, profile(0.8)
    name = convert.name_of(fingerprint_of([model]), quantization=faster.quantization)
    converted = convert.converted_models(None).of(name)
    if is_converted:
        converted.parent.mkdir(parents=True)
        converted.touch()
    monkeypatch.setattr(opening, "open_planned", Opened)
    opened: Any = opening.open_backend(model, replace(options, memory_bytes=memory_bytes))
    assert opened.plan.kernels == (faster if kernels == OPENVINO else kernels)
    assert reason in opened.plan.why
    if "that is done" in reason:
        assert machine.converted.wait(5), "it is converted beside the requests"
        assert machine.converted_with == faster.quantization
        converted.parent.mkdir(parents=True)
        converted.touch()
        opened = opening.open_backend(model, options)
        assert opened.plan.kernels == faster
        assert len(machine.measured) == 1
    else:
        assert not machine.converted.wait(0.1)


@pytest.mark.parametrize(
    "error", [ConfigError("scripted"), EngineFailedError("scripted"), ValueError("scripted")]
)
@pytest.mark.parametrize(("number", "kernels"), [(Q4_0, REPACKED), (Q4_K_M, AS_STORED)])
def test_where_openvino_cannot_be_measured_layouts_are_and_the_next_start_tries_again(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    error: Exception,
    number: int,
    kernels: Kernels,
) -> None:
    machine.failures[True], machine.format = error, number
    machine.profiles[AS_STORED] = profile(1.5)
    plan = choose(model, replace(options, load_mode="none"))
    assert plan.kernels == kernels
    assert plan.why.startswith("OpenVINO could not be measured: scripted")
    machine.failures.clear()
    assert choose(model, options).kernels == OPENVINO


@pytest.mark.parametrize(
    ("number", "change", "is_measured"),
    [
        (Q4_0, {}, True),
        (Q4_K_M, {}, True),
        (F16, {}, False),  # whose products are not rounded at all
        (BF16, {}, False),
        (Q4_0, {"quantization": "none"}, False),
        (Q4_0, {"memory_bytes": 12}, True),
        (Q4_0, {"memory_bytes": 11}, False),
    ],
)
def test_eight_bits_are_taken_where_they_are_faster_and_as_exact(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    number: int,
    change: dict[str, Any],
    is_measured: bool,
) -> None:
    machine.format, machine.profiles[OPENVINO_W8A8] = number, profile(0.8)
    plan = choose(model, replace(options, **change))
    assert plan.kernels == (OPENVINO_W8A8 if is_measured else OPENVINO)
    assert (OPENVINO_W8A8 in machine.measured[0][1]) is is_measured
    assert str(plan).startswith("OpenVINO, w8a8: " if is_measured else "OpenVINO: ")


def test_eight_bits_that_are_named_are_not_measured(model: Path, options: EngineOptions) -> None:
    plan = choose(model, replace(options, backend="openvino", quantization="w8a8"))
    assert str(plan) == "OpenVINO, w8a8: as configured"


@pytest.mark.parametrize("backend", ["auto", "llama.cpp"])
def test_quantization_needs_openvino(options: EngineOptions, backend: BackendName) -> None:
    with pytest.raises(ConfigError, match=r"w8a8 needs engine\.backend: openvino"):
        replace(options, backend=backend, quantization="w8a8")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_unified": True}, "engine.kv_unified"),
        ({"cache_type_k": "q8_0"}, "both f16, both bf16 or both q8_0"),
        ({"cache_type_v": "bf16"}, "both f16, both bf16 or both q8_0"),
        ({"profile_limit_s": 0.0}, "nothing is measured"),
        ({"backend": "llama.cpp"}, "as configured"),
        ({"backend": "llama.cpp", "profile_limit_s": 0.0}, "as configured"),
    ],
)
def test_what_openvino_lacks_or_options_say_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions, change: dict[str, Any], reason: str
) -> None:
    plan = choose(model, replace(options, **change))
    assert plan.kernels == REPACKED
    assert reason in plan.why
    assert not machine.measured


@pytest.mark.parametrize("limit_s", [0.0, 27.0])
def test_openvino_that_is_named_has_no_rival(
    machine: Machine, model: Path, options: EngineOptions, limit_s: float
) -> None:
    machine.format = Q4_K_M
    plan = choose(model, replace(options, backend="openvino", profile_limit_s=limit_s))
    assert (plan.kernels, plan.why) == (OPENVINO, "as configured")
    assert not machine.measured


def test_without_the_package_llama_cpp(
    machine: Machine, model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "versions", _raiser(ConfigError("Install corral[openvino].")))
    plan = choose(model, options)
    assert (plan.kernels, plan.why) == (REPACKED, "Install corral[openvino]")
    assert not machine.measured


def _raiser(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


@pytest.mark.parametrize(
    ("as_stored_s", "kernels"), [(1.5, AS_STORED), (1.95, REPACKED), (3.0, REPACKED)]
)
def test_weights_stay_as_they_are_stored_where_that_is_faster(
    machine: Machine, model: Path, options: EngineOptions, as_stored_s: float, kernels: Kernels
) -> None:
    machine.format, machine.profiles[AS_STORED] = Q4_K_M, profile(as_stored_s)
    options = replace(options, backend="llama.cpp")
    plan = choose(model, options)
    assert plan.kernels == kernels
    assert plan.why.startswith("as configured; ")
    assert "a request with 1 and 4 at once takes " in plan.why
    assert choose(model, options) == plan
    assert machine.measured == [("model.gguf", [REPACKED, AS_STORED])]


@pytest.mark.parametrize(
    ("prompt_s", "least"),
    [
        (0.5, 6),
        (2.0, None),
    ],  # the line from 0.12 to 0.5 s crosses that from 0.03 to 1 s behind 5 rows
)
def test_batches_of_many_rows_have_weights_as_they_are_stored_where_that_is_faster(
    machine: Machine, model: Path, options: EngineOptions, prompt_s: float, least: int | None
) -> None:
    machine.format = Q4_K_M
    machine.profiles |= {
        AS_STORED: Profile({1: 0.04, 4: 0.12}, {16: prompt_s}),
        REPACKED: Profile({1: 0.01, 4: 0.03}, {16: 1.0}),
    }
    options = replace(options, backend="llama.cpp")
    assert choose(model, options).kernels == Kernels(many_from=least)
    assert choose(model, replace(options, memory_bytes=20)).kernels.many_from is None


@pytest.mark.parametrize(
    ("change", "many_from"), [({}, 5), ({"memory_bytes": 20}, None), ({"load_mode": "none"}, None)]
)
def test_few_rows_have_the_files_weights_beside_w8a8_where_that_is_faster(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    change: dict[str, Any],
    many_from: int | None,
) -> None:
    machine.profiles |= {
        OPENVINO: Profile({1: 0.01, 4: 0.03}, {16: 1.0}),
        OPENVINO_W8A8: Profile({1: 0.02, 4: 0.06}, {16: 0.5}),
    }
    plan = choose(model, replace(options, **change))
    assert plan.kernels == replace(OPENVINO_W8A8, many_from=many_from)
    assert machine.measured == [("slice.gguf", [REPACKED, OPENVINO, OPENVINO_W8A8])]
    assert ("w8a8 for batches of 5 rows and more" in plan.why) is (many_from is not None)


def test_no_rows_have_the_files_weights_where_w8a8_is_always_faster(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.profiles |= {
        OPENVINO: Profile({1: 0.02, 4: 0.06}, {16: 1.0}),
        OPENVINO_W8A8: Profile({1: 0.01, 4: 0.03}, {16: 0.5}),
    }
    plan = choose(model, options)
    assert plan.kernels == OPENVINO_W8A8
    assert "rows and more" not in plan.why


@pytest.mark.parametrize(
    ("change", "room"),
    [
        ({"memory_bytes": None}, True),
        ({"memory_bytes": 500}, True),
        ({"memory_bytes": 499}, False),
        ({"load_mode": "none"}, False),
    ],
)
def test_both_layouts_take_a_quarter_of_what_one_leaves(
    machine: Machine, model: Path, options: EngineOptions, change: dict[str, Any], room: bool
) -> None:
    model.write_bytes(bytes(100))
    machine.format = Q4_K_M
    machine.profiles |= {
        AS_STORED: Profile({1: 0.04, 4: 0.12}, {16: 0.5}),
        REPACKED: Profile({1: 0.01, 4: 0.03}, {16: 1.0}),
    }
    plan = choose(model, replace(options, backend="llama.cpp", **change))
    assert (plan.kernels.many_from is not None) is room


def test_openvino_is_compared_with_the_faster_layout(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.format, machine.profiles[AS_STORED] = Q4_K_M, profile(0.9)
    plan = choose(model, options)
    assert plan.kernels == AS_STORED
    assert machine.measured == [("slice.gguf", [REPACKED, AS_STORED, OPENVINO, OPENVINO_W8A8])]
    machine.profiles[OPENVINO] = profile(0.8)
    plan = choose(model, replace(options, n_slots=3))
    assert (plan.kernels, plan.llama_cpp) == (OPENVINO, AS_STORED)


def test_layouts_that_were_compared_beside_other_programs_are_compared_again(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.format, machine.share = Q4_K_M, 0.5
    machine.profiles[AS_STORED] = profile(1.5)
    options = replace(options, backend="llama.cpp")
    assert choose(model, options).kernels == AS_STORED
    machine.profiles[AS_STORED] = profile(3.0)
    assert choose(model, options).kernels == REPACKED


@pytest.mark.parametrize("error", [ConfigError("scripted"), EngineFailedError("scripted")])
def test_weights_are_repacked_if_the_comparison_fails(
    machine: Machine, model: Path, options: EngineOptions, error: Exception
) -> None:
    machine.format, machine.failures[False] = Q4_K_M, error
    machine.profiles[AS_STORED] = profile(1.5)
    options = replace(options, backend="llama.cpp")
    assert choose(model, options).kernels == REPACKED
    machine.failures.clear()
    assert choose(model, options).kernels == AS_STORED


class Opened:
    """Stands for a backend that was opened with a plan."""

    def __init__(self, plan: Plan, *_: object) -> None:
        self.plan = plan
        self.cache_plan = CachePlan(MODE, "", profile(1.0))


def test_llama_cpp_in_openvinos_place_has_the_layout_that_was_measured(
    machine: Machine, model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_planned(plan: Plan, *_: object) -> Opened:
        if plan.kernels == OPENVINO:
            raise ConfigError("scripted")
        return Opened(plan)

    machine.format, machine.profiles[AS_STORED] = Q4_K_M, profile(1.5)
    monkeypatch.setattr(opening, "open_planned", open_planned)
    opened: Any = opening.open_backend(model, options)
    assert opened.plan.kernels == AS_STORED
    assert opened.plan.why == "OpenVINO could not be started: scripted"
    assert choose(model, options).kernels == OPENVINO, "the next start tries again"


@pytest.mark.parametrize("backend", ["openvino", "llama.cpp"])
def test_a_backend_that_is_named_has_no_substitute(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    monkeypatch: pytest.MonkeyPatch,
    backend: BackendName,
) -> None:
    def fail(*_: object) -> Opened:
        raise ConfigError("scripted")

    monkeypatch.setattr(opening, "open_planned", fail)
    with pytest.raises(ConfigError, match="scripted"):
        opening.open_backend(model, replace(options, backend=backend))
