"""Which backend `auto` opens, and when it measures. What is measured is scripted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.backends import choice as choosing
from serve_app.engine.backends import layouts
from serve_app.engine.backends.base import Setup
from serve_app.engine.backends.choice import LLAMA_CPP, OPENVINO
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, EngineFailedError
from serve_app.llama.formats import BackendName, Threads
from serve_app.llama.model import fingerprint_of
from serve_app.openvino import convert
from serve_app.openvino.gguf_model import UnreadableError
from serve_app.progress import nowhere

OPTIONS = EngineOptions(n_slots=4, n_ctx_slot=64, threads=1, backend="auto")


def profile(seconds: float) -> Profile:
    return Profile({1: seconds, 4: 2 * seconds}, {16: seconds})


class Machine:
    """The times that a measurement finds, and how often there was one."""

    def __init__(self) -> None:
        self.n_measured = 0
        self.share, self.openvino_s, self.llama_cpp_s = 1.0, 1.0, 2.0
        self.failure: Exception | None = None
        self.architecture, self.unreadable, self.converted_bytes = "llama", "", 8
        self.conversion_s = 0.0
        self.converted = threading.Event()
        """Whether the model was converted beside requests."""

    def check(self, *_: object) -> SimpleNamespace:
        if self.unreadable:
            raise UnreadableError(self.unreadable)
        return SimpleNamespace(converted_bytes=lambda: self.converted_bytes)

    def apart(self, _: object, path: Path, *__: object) -> list[Profile] | tuple[float, float]:
        assert path.name == ("model.gguf" if self.architecture == "bert" else "slice.gguf")
        self.n_measured += 1
        if self.failure is not None:
            raise self.failure
        if self.architecture == "bert":
            return self.openvino_s, self.llama_cpp_s
        return [
            replace(profile(seconds), share=self.share)
            for seconds in (self.openvino_s, self.llama_cpp_s)
        ]

    @contextmanager
    def converted_slice(self, *_: object) -> Iterator[tuple[Path, float, float]]:
        yield Path("slice.gguf"), 1 / 8, self.conversion_s

    def convert(self, *_: object) -> Path:
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
    monkeypatch.setattr(convert, "checked", made.check)
    monkeypatch.setattr(convert, "converted_of", made.convert)

    def open_model(path: Path, **_: object) -> SimpleNamespace:
        return SimpleNamespace(
            files=(path,),
            path=path,
            fingerprint=lambda: b"a" * 32,
            is_recurrent=False,
            architecture=made.architecture,
            is_causal=made.architecture == "llama",
            pooling=None,
            pooling_with=lambda configured: configured or "mean",
        )

    monkeypatch.setattr(choosing, "Model", open_model)
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
    first = choosing.chosen(model, options)
    assert first.name == OPENVINO
    assert "0.50 with 1 at once, 0.49 with 4 at once, 0.49 in the mean" in first.reason
    assert choosing.chosen(model, options) == first
    assert machine.n_measured == 1


@pytest.mark.parametrize(
    "change",
    [
        {"n_slots": 2},
        {"threads": 2},
        {"n_ctx_slot": 128},
        {"profile_limit_s": 5.0},
        {"cache_type_k": "bf16", "cache_type_v": "bf16"},
    ],
    ids=str,
)
def test_other_conditions_are_measured_anew(
    machine: Machine, model: Path, options: EngineOptions, change: dict[str, Any]
) -> None:
    choosing.chosen(model, options)
    machine.openvino_s = 3.0
    assert choosing.chosen(model, replace(options, **change)).name == LLAMA_CPP
    assert choosing.chosen(model, options).name == OPENVINO


def test_another_file_is_measured_anew(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    choosing.chosen(model, options)
    model.write_bytes(b"other weights")
    choosing.chosen(model, options)
    assert machine.n_measured == 2


def test_beside_other_programs_llama_cpp_computes_until_the_next_start(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.share = 0.5
    choice = choosing.chosen(model, options)
    assert choice.name == LLAMA_CPP
    assert "the next start measures again" in choice.reason
    machine.share = 1.0
    assert choosing.chosen(model, options).name == OPENVINO


def test_a_model_that_openvino_refuses_is_not_tried_again(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.unreadable = "the architecture mamba is not known"
    for _ in range(2):
        choice = choosing.chosen(model, options)
        assert choice.name == LLAMA_CPP
        assert "mamba is not known" in choice.reason
        machine.unreadable = ""
    assert machine.n_measured == 0


def test_a_model_that_memory_has_no_room_for_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    choice = choosing.chosen(model, replace(options, memory_bytes=machine.converted_bytes - 1))
    assert choice.name == LLAMA_CPP
    assert "GiB of memory" in choice.reason
    assert machine.n_measured == 0


@pytest.mark.parametrize(("seconds", "name"), [(1.0, OPENVINO), (3.0, LLAMA_CPP)])
def test_encoders_are_compared_by_the_time_of_texts(
    machine: Machine, model: Path, options: EngineOptions, seconds: float, name: KernelsName
) -> None:
    machine.architecture, machine.openvino_s = "bert", seconds
    choice = choosing.chosen(model, options)
    assert choice.name == name
    assert f"the time of texts, OpenVINO's to llama.cpp's, is {seconds / 2:.2f}" in choice.reason
    machine.openvino_s = 4.0
    assert choosing.chosen(model, options) == choice


def test_an_encoder_that_openvino_lacks_is_llama_cpps(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    machine.architecture = "jina-bert-v2"
    choice = choosing.chosen(model, options)
    assert choice.name == LLAMA_CPP
    assert "attention to tokens behind" in choice.reason


def test_streams_wait_for_a_slice_for_its_part_of_the_time(
    machine: Machine, model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def compare(_: Profile, __: Profile, sized: EngineOptions, *___: object) -> tuple[bool, str]:
        bounds.append(sized.max_stall_s)
        return True, "scripted"

    monkeypatch.setattr(choosing, "compared", compare)
    choosing.chosen(model, replace(options, max_stall_s=0.25))
    choosing.chosen(model, replace(options, max_stall_s=None))
    assert machine.n_measured == 2
    assert bounds == [0.25 / 8, None]


def test_a_small_model_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions
) -> None:
    model.write_bytes(b"www")
    choice = choosing.chosen(model, options)
    assert choice.name == LLAMA_CPP
    assert "small" in choice.reason
    assert machine.n_measured == 0


@pytest.mark.parametrize(
    ("conversion_s", "is_converted", "memory_bytes", "name", "reason"),
    [
        (31.0, False, None, LLAMA_CPP, "takes about 31 s: that is done beside the requests"),
        (31.0, False, 20, LLAMA_CPP, "takes about 31 s and much memory"),
        (31.0, True, None, OPENVINO, "in the mean"),
        (29.0, False, None, OPENVINO, "in the mean"),
    ],
)
def test_nobody_waits_for_a_long_conversion(
    machine: Machine,
    model: Path,
    options: EngineOptions,
    monkeypatch: pytest.MonkeyPatch,
    conversion_s: float,
    is_converted: bool,
    memory_bytes: int | None,
    name: KernelsName,
    reason: str,
) -> None:
    machine.conversion_s = conversion_s
    converted = convert.converted_models(None).of(convert.name_of(fingerprint_of([model])))
    if is_converted:
        converted.parent.mkdir(parents=True)
        converted.touch()
    monkeypatch.setattr(
        choosing, "open_named", lambda _name, _path, options, _report: Opened(options)
    )
    opened: Any = choosing.open_backend(model, replace(options, memory_bytes=memory_bytes))
    assert opened.options.backend == name
    assert reason in opened.setup.kernels_reason
    if "that is done" in reason:
        assert machine.converted.wait(5), "it is converted beside the requests"
        converted.parent.mkdir(parents=True)
        converted.touch()
        opened = choosing.open_backend(model, options)
        assert opened.options.backend == OPENVINO
        assert machine.n_measured == 1
    else:
        assert not machine.converted.wait(0.1)


@pytest.mark.parametrize(
    "error", [ConfigError("scripted"), EngineFailedError("scripted"), ValueError("scripted")]
)
def test_a_measurement_that_failed_is_tried_again(
    machine: Machine, model: Path, options: EngineOptions, error: Exception
) -> None:
    machine.failure = error
    choice = choosing.chosen(model, options)
    assert choice.name == LLAMA_CPP
    assert "scripted" in choice.reason
    machine.failure = None
    assert choosing.chosen(model, options).name == OPENVINO


@pytest.mark.parametrize("backend", ["auto", LLAMA_CPP])
def test_quantization_needs_openvino(options: EngineOptions, backend: BackendName) -> None:
    with pytest.raises(ConfigError, match=r"needs engine\.backend: openvino"):
        replace(options, backend=backend, quantization="w8a8")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_unified": True}, "engine.kv_unified"),
        ({"cache_type_k": "q8_0"}, "both f16, both bf16 or both q8_0"),
        ({"cache_type_v": "bf16"}, "both f16, both bf16 or both q8_0"),
        ({"profile_limit_s": 0.0}, "nothing is measured"),
    ],
)
def test_what_openvino_lacks_is_not_measured(
    machine: Machine, model: Path, options: EngineOptions, change: dict[str, object], reason: str
) -> None:
    choice = choosing.chosen(model, replace(options, **change))  # type: ignore[arg-type]
    assert choice.name == LLAMA_CPP
    assert reason in choice.reason
    assert machine.n_measured == 0


def test_without_the_package_llama_cpp(
    machine: Machine, model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "versions", _raiser(ConfigError("Install corral[openvino].")))
    choice = choosing.chosen(model, options)
    assert choice.name == LLAMA_CPP
    assert choice.reason == "Install corral[openvino]"
    assert machine.n_measured == 0


def _raiser(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


class Layouts:
    """The times of a request with both layouts of weights, and how often they were measured."""

    def __init__(self) -> None:
        self.as_stored_s, self.repacked_s, self.share = 1.5, 2.0, 1.0
        self.n_measured = 0
        self.failure: Exception | None = None

    def apart(self, _function: object, *_: object) -> tuple[Profile, Profile]:
        self.n_measured += 1
        if self.failure is not None:
            raise self.failure
        return replace(profile(self.as_stored_s), share=self.share), profile(self.repacked_s)


@pytest.fixture
def measured_layouts(monkeypatch: pytest.MonkeyPatch) -> Layouts:
    """A file in a format for which llama.cpp has two layouts."""
    made = Layouts()
    monkeypatch.setattr(layouts, "apart", made.apart)
    monkeypatch.setattr(layouts, "_has_layouts", lambda _path: True)
    return made


@pytest.mark.parametrize(("as_stored_s", "repack"), [(1.5, False), (1.95, True), (3.0, True)])
def test_weights_stay_as_they_are_stored_where_that_is_faster(
    measured_layouts: Layouts, model: Path, options: EngineOptions, as_stored_s: float, repack: bool
) -> None:
    measured_layouts.as_stored_s = as_stored_s
    choice = layouts.chosen_layout(model, options, nowhere)
    assert choice.repack is repack
    layout = "repacked" if repack else "as they are stored"
    ratio = f"{as_stored_s / 2:.2f}"
    expected = f"weights {layout}: the time of a request, as stored to repacked, is {ratio} with 1"
    assert choice.reason.startswith(expected)
    assert layouts.chosen_layout(model, options, nowhere) == choice
    assert measured_layouts.n_measured == 1


@pytest.mark.parametrize(
    ("prompt_s", "least"),
    [
        (0.5, 6),
        (2.0, None),
    ],  # the line from 0.12 to 0.5 s crosses that from 0.03 to 1 s behind 5 rows
)
def test_batches_of_many_rows_have_weights_as_they_are_stored_where_that_is_faster(
    options: EngineOptions, prompt_s: float, least: int | None
) -> None:
    as_stored = Profile({1: 0.04, 4: 0.12}, {16: prompt_s})
    repacked = Profile({1: 0.01, 4: 0.03}, {16: 1.0})
    choice = layouts.fastest_layout(as_stored, repacked, options, room_for_both=True)
    assert choice.repack
    assert choice.stored_from == least
    single = layouts.fastest_layout(as_stored, repacked, options, room_for_both=False)
    assert single.stored_from is None


@pytest.mark.parametrize(
    ("n_bytes", "change", "room"),
    [
        (100, {"memory_bytes": None}, True),
        (100, {"memory_bytes": 500}, True),
        (100, {"memory_bytes": 499}, False),
        (100, {"load_mode": "none"}, False),
    ],
)
def test_both_layouts_take_a_quarter_of_what_one_leaves(
    tmp_path: Path, options: EngineOptions, n_bytes: int, change: dict[str, Any], room: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(n_bytes))
    assert layouts.has_room_for_both([path], replace(options, **change)) is room


def test_layouts_that_were_compared_beside_other_programs_are_compared_again(
    measured_layouts: Layouts, model: Path, options: EngineOptions
) -> None:
    measured_layouts.share = 0.5
    assert not layouts.chosen_layout(model, options, nowhere).repack
    measured_layouts.as_stored_s = 3.0
    assert layouts.chosen_layout(model, options, nowhere).repack


@pytest.mark.parametrize("error", [ConfigError("scripted"), EngineFailedError("scripted")])
def test_weights_are_repacked_if_the_comparison_fails(
    measured_layouts: Layouts, model: Path, options: EngineOptions, error: Exception
) -> None:
    measured_layouts.failure = error
    assert layouts.chosen_layout(model, options, nowhere).repack
    measured_layouts.failure = None
    assert not layouts.chosen_layout(model, options, nowhere).repack


@pytest.mark.parametrize("change", [{"repack": True}, {"repack": False}, {"profile_limit_s": 0}])
def test_layouts_that_are_configured_or_not_to_be_measured_are_not(
    measured_layouts: Layouts, model: Path, options: EngineOptions, change: dict[str, Any]
) -> None:
    choice = layouts.chosen_layout(model, replace(options, **change), nowhere)
    assert choice.repack is change.get("repack", True)
    assert measured_layouts.n_measured == 0


class Opened:
    """Stands for a backend that was opened with these options."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.setup = Setup(LLAMA_CPP, layouts.MODE, Threads.alike(1, None), profile(1.0))


def test_a_named_backend_has_the_layout_that_was_measured(
    measured_layouts: Layouts, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        choosing, "open_named", lambda _name, _path, options, _report: Opened(options)
    )
    opened: Any = choosing.open_backend(model, replace(OPTIONS, backend=LLAMA_CPP))
    assert opened.options.repack is False
    assert opened.setup.kernels_reason.startswith("as configured; weights as they are stored:")


@pytest.mark.usefixtures("measured_layouts")
def test_llama_cpp_in_openvinos_place_has_the_layout_that_was_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_named(name: KernelsName, _path: Path, options: EngineOptions, _report: Any) -> Opened:
        if name == OPENVINO:
            raise ConfigError("scripted")
        return Opened(options)

    asked: list[EngineOptions] = []

    def chosen(_path: Path, options: EngineOptions, _report: Any) -> choosing.KernelsChoice:
        asked.append(options)
        return choosing.KernelsChoice(OPENVINO, "measured")

    monkeypatch.setattr(choosing, "chosen", chosen)
    monkeypatch.setattr(choosing, "open_named", open_named)
    opened: Any = choosing.open_backend(model, OPTIONS)
    assert asked[0].repack is False, "OpenVINO is compared with the faster layout"
    assert opened.options.backend == LLAMA_CPP
    assert opened.options.repack is False
    assert "OpenVINO could not be started: scripted" in opened.setup.kernels_reason
