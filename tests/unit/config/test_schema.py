"""What a configuration may say, and what Serve gets of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import PoolingType

from serve_app.base.errors import ConfigError
from serve_app.cluster.deployments import engine_options, ingress_options
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import ModelSource, ProjectorSource
from serve_app.engine.backends.draft_model import slot_bytes
from serve_app.kernels.llama.model import Model
from serve_app.run.placement.machine import Machine
from serve_app.run.resolving import resolve
from serve_app.server.access.bodies import BodyLimits
from serve_app.server.access.network import NetworkPolicy
from serve_app.store.builtin_model import BUILTIN_MODEL, BUILTIN_PROJECTOR
from tests.integration.models.prediction_models import write_head, write_random
from tests.unit.run.placement.machines import EPYC, SMALL, topology
from tools.random_models.encoder import SHAPES as ENCODERS
from tools.random_models.encoder import write_encoder
from tools.random_models.model import SHAPES, write_random_gguf

ROOT = Path(__file__).parents[3]


def model(**fields: Any) -> dict[str, Any]:
    sizes = {"n_slots": 4, "n_ctx_slot": 256, "threads": 1}
    return {"id": "m", "source": {"builtin": True}, "engine": sizes, **fields}


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", "off"), ("on", "on"), ("no", "off"), ("auto", "auto"), ("'off'", "off")],
)
def test_reasoning_is_off_as_yaml_writes_it(text: str, value: str) -> None:
    defaults = yaml.safe_load(f"reasoning: {text}")
    (served,) = schema.parse({"models": [model(defaults=defaults)]}).models
    assert served.defaults.reasoning == value


@pytest.mark.parametrize("value", ["maybe", [], 1])
def test_reasoning_is_nothing_else(value: object) -> None:
    with pytest.raises(ConfigError, match=r"defaults\.reasoning"):
        schema.parse({"models": [model(defaults={"reasoning": value})]})


def test_the_shipped_file_is_valid() -> None:
    app = schema.load(ROOT / "serve_config.yaml")
    assert [model.id for model in app.models] == ["corral-demo"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "models: Field required"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"model": []}, "model: there is no such field, did you mean models?"),
        (
            {"models": [model(), model()]},
            "several entries have the id 'm'. Give each an id of its own",
        ),
        ({"models": [model(), model(id="b", aliases=["m"])]}, "two models have the same name (m)"),
        (
            {"models": [model(aliases=["x"]), model(id="b", aliases=["x"])]},
            "two models have the same name (x)",
        ),
        ({"models": [model(id="a b")]}, "models.0.id: String should match"),
        ({"models": [model(source={})]}, "models.0.source: Value error, give exactly one"),
        ({"models": [model(source={"repo_id": "a/b"})]}, "repo_id and filename belong together"),
        ({"models": [model(engine={"n_slots": 0})]}, "models.0.engine.n_slots: "),
        ({"models": [model(engine={"slots": 4})]}, "models.0.engine.slots: there is no such field"),
    ],
)
def test_faults_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        schema.parse(args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_checking_a_file_prints_one_line_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": {"models": [model(id="")]}}]}))
    command = [sys.executable, "-P", "-m", "serve_app.cli", "check", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert f"invalid configuration: {file}:8: models.0.id: " in result.stderr
    assert result.stderr.count("\n") == 1


HERE = Machine(topology(SMALL), None, 2**34, 2**34)
SCALING = {
    "min_replicas": 1,
    "max_replicas": 1,
    "target_ongoing_requests": 4,
    "policy": {"policy_function": "serve_app.cluster.autoscaling:by_pressure"},
    "look_back_period_s": 15,
    "upscale_delay_s": 10,
}


def engine_options_on(here: Machine, entry: dict[str, Any]) -> dict[str, Any]:
    """The options of one model's deployment."""
    app = schema.parse({"models": [entry]})
    return engine_options(app.models[0], resolve(app, here)[0])


def test_serve_gets_explicit_options() -> None:
    options = engine_options_on(HERE, model())
    assert options == {
        "name": "engine-m",
        "max_ongoing_requests": 2 * (4 + 8) + 4 * 4 + 16,
        "max_queued_requests": 64,
        "autoscaling_config": SCALING,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": 30,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 3,
        "ray_actor_options": {"num_cpus": 1},
        "request_router_config": options["request_router_config"],
    }


def test_configured_options_win() -> None:
    serve = {
        "autoscaling_config": {"max_replicas": 9, "upscale_delay_s": 3},
        "max_ongoing_requests": 5,
        "ray_actor_options": {"num_cpus": 2, "resources": {"big": 1}},
    }
    options = engine_options_on(HERE, model(serve=serve))
    assert options["max_ongoing_requests"] == 5
    assert options["ray_actor_options"] == {"num_cpus": 2, "resources": {"big": 1}}
    assert options["autoscaling_config"] == SCALING | {"max_replicas": 9, "upscale_delay_s": 3}


@pytest.mark.parametrize(
    ("cores", "n_models", "num_cpus", "threads"),
    [(8, 1, 8, 8), (8, 2, 4, 8), (8, 3, 2, 8), (2, 3, 0.66, 2)],
)
def test_models_share_a_machine_in_turns(
    cores: int, n_models: int, num_cpus: float, threads: int
) -> None:
    here = Machine(topology(((i,), 0) for i in range(cores)), None, 2**34, 2**34)
    sizes = {"n_slots": 4, "n_ctx_slot": 256}
    entries = [model(id=f"m{i}", engine=sizes) for i in range(n_models)]
    app = schema.parse({"models": entries})
    for entry, resolved in zip(app.models, resolve(app, here), strict=True):
        assert engine_options(entry, resolved)["ray_actor_options"] == {"num_cpus": num_cpus}
        assert resolved.options.threads == threads


def test_a_chat_model_gets_the_memory_that_encoders_leave(tmp_path: Path) -> None:
    here = Machine(topology(((i,), 0) for i in range(2)), None, 2**34, 2**34)
    path = write_encoder(tmp_path / "bert.gguf", ENCODERS["tiny"], PoolingType.MEAN)
    entries = [{"id": "chat", "source": {"builtin": True}}] + [
        {"id": name, "source": {"path": str(path)}} for name in ("embed", "rank")
    ]
    chat, *others = resolve(schema.parse({"models": entries}), here)
    (alone,) = resolve(schema.parse({"models": entries[:1]}), here)
    assert alone.sizing.endswith("sized for 16.0 GiB of memory")
    assert chat.sizing.endswith("sized for 15.0 GiB of memory")
    assert {one.sizing.partition("; ")[2] for one in others} == {"sized for 0.5 GiB of memory"}
    less = (alone.options.cache_ram_bytes - chat.options.cache_ram_bytes) * 8
    assert 2**30 < less < 2**30 + 2**24


@pytest.mark.parametrize("more_may_come", [False, True])
def test_models_on_demand_have_the_memory_that_any_of_them_needs(
    tmp_path: Path, *, more_may_come: bool
) -> None:
    """A third and half of what is left over, if others may be added, of which nothing is known."""
    here = Machine(topology(((i,), 0) for i in range(4)), None, 2**34, 2**34)
    path = write_encoder(tmp_path / "bert.gguf", ENCODERS["tiny"], PoolingType.MEAN)
    entries = [
        {"id": name, "source": {"path": str(path)}, **more}
        for name, more in [("stays", {}), ("a", {"keep_alive": "1m"}), ("b", {"keep_alive": "1m"})]
    ] + [{"id": "chat", "source": {"builtin": True}}]
    app = schema.parse({"models": entries, "manage_models": more_may_come})
    stays, a, b, chat = resolve(app, here)
    assert stays.sizing.endswith("sized for 0.5 GiB of memory")
    assert a.sizing == b.sizing
    assert a.sizing.endswith(f"sized for {10.1 if more_may_come else 0.5} GiB of memory")
    assert chat.sizing.endswith(f"sized for {5.4 if more_may_come else 15.0} GiB of memory")


def test_fixed_replicas_switch_autoscaling_off() -> None:
    ingress = schema.parse({"models": [model()], "ingress": {"serve": {"num_replicas": 2}}})
    options = ingress_options(ingress.ingress)
    assert options["num_replicas"] == 2
    assert "autoscaling_config" not in options


@pytest.mark.parametrize(("n_ongoing", "n_bodies"), [(None, 125), (80, 10), (3, 1)])
def test_slow_bodies_leave_room_in_the_ingress(n_ongoing: int | None, n_bodies: int) -> None:
    serve = {} if n_ongoing is None else {"max_ongoing_requests": n_ongoing}
    ingress = schema.parse({"models": [model()], "ingress": {"serve": serve}}).ingress
    options = ingress_options(ingress)
    assert options["max_ongoing_requests"] == (n_ongoing or 1000) + 16
    assert ingress.max_ongoing_requests == (n_ongoing or 1000)
    assert options["max_queued_requests"] == (n_ongoing or 1000)
    assert options["autoscaling_config"]["target_ongoing_requests"] >= n_bodies
    assert BodyLimits.of(ingress) == BodyLimits(n_bodies, 64 * 2**20, 500)


@pytest.mark.parametrize(
    "host", ["corral", "corral.example", "*.corral.example", "*", "10.0.0.1", "fd00::1"]
)
def test_hosts_are_names(host: str) -> None:
    ingress = schema.parse({"models": [model()], "ingress": {"allowed_hosts": [host]}}).ingress
    assert NetworkPolicy.of(ingress).allowed_hosts == (host,)


@pytest.mark.parametrize("host", ["", "http://corral", "corral:8000", "*example", "a.*.b", "[::1]"])
def test_hosts_have_no_ports_and_schemes(host: str) -> None:
    with pytest.raises(ConfigError, match=r"ingress\.allowed_hosts\.0"):
        schema.parse({"models": [model()], "ingress": {"allowed_hosts": [host]}})


EPYC_HERE = Machine(topology(EPYC), None, 2**39, 2**39)


def options_on_epyc(serve: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """Of one model on two sockets of 64 cores."""
    return engine_options_on(EPYC_HERE, model(engine=engine, serve=serve))


@pytest.mark.parametrize(
    ("serve", "engine", "replicas", "num_cpus"),
    [
        ({}, {}, (2, 2), 128),
        ({"autoscaling_config": {"upscale_delay_s": 3}}, {}, (1, 2), 128),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 9}}, {}, (0, 9), 128),
        ({"ray_actor_options": {"num_cpus": 8}}, {}, (1, 1), 8),
        ({}, {"threads": 16}, (1, 1), 32),
        ({}, {"threads_batch": 64}, (1, 1), 256),
        ({}, {"numa": "distribute"}, (1, 1), 256),
    ],
)
def test_a_replica_for_each_numa_node(
    serve: dict[str, Any], engine: dict[str, Any], replicas: tuple[int, int], num_cpus: float
) -> None:
    options = options_on_epyc(serve, **engine)
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == replicas
    assert options["ray_actor_options"] == {"num_cpus": num_cpus}


def test_a_fixed_number_of_replicas_is_not_scaled() -> None:
    options = options_on_epyc({"num_replicas": 3})
    assert options["num_replicas"] == 3
    assert "autoscaling_config" not in options


def resolved_on(here: Machine, serve: dict[str, Any] | None = None) -> ResolvedModel:
    entry = model(engine={}, serve=serve or {})
    return resolve(schema.parse({"models": [entry]}), here)[0]


def test_slots_and_memory_by_the_share() -> None:
    """24 GiB among three replicas of eight CPUs each: a third for each."""
    cores = [((i,), 0) for i in range(24)]
    alone = resolved_on(Machine(topology(cores[:8]), None, 8 * 2**30, 2**36))
    third = resolved_on(
        Machine(topology(cores), None, 24 * 2**30, 2**36),
        {"num_replicas": 3, "ray_actor_options": {"num_cpus": 8}},
    )
    assert third.options.n_slots == alone.options.n_slots == 32
    assert third.options.n_ctx_slot == alone.options.n_ctx_slot
    assert third.options.cache_ram_bytes == alone.options.cache_ram_bytes
    assert third.options.threads == 8
    assert third.sizing.endswith("24.0 GiB of memory for 3 replicas")


def test_as_many_replicas_as_the_memory_has_room_for() -> None:
    """The built-in model needs little: a machine with hardly any memory."""
    small = resolved_on(Machine(topology(EPYC), None, 2**29, 2**29))
    assert (small.n_replicas, small.num_cpus, small.options.threads) == (1, 256, 128)
    assert small.sizing.startswith("1 replica instead of 2, because memory has no room for more;")
    in_use = resolved_on(Machine(topology(EPYC), None, 2**29, 2**39))
    assert in_use.n_replicas == resolved_on(EPYC_HERE).n_replicas == 2


def test_models_on_demand_share_places() -> None:
    engine = {"n_slots": 4, "n_ctx_slot": 256}
    entries = [model(id=name, engine=engine, keep_alive="1m30s") for name in "abc"]
    app = schema.parse({"models": entries})
    (alone,) = resolve(schema.parse({"models": entries[:1]}), HERE)
    assert {one.num_cpus for one in resolve(app, HERE)} == {alone.num_cpus}
    scaling = engine_options(app.models[0], alone)["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 1)


def test_what_the_system_says_of_a_file_is_said_with_the_model() -> None:
    path = f"/tmp/{'x' * 300}.gguf"
    app = schema.parse({"models": [model(source={"path": path})]})
    with pytest.raises(ConfigError, match=r"models \(m\): .*File name too long"):
        resolve(app)


def test_a_duration_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="30s, 5m or 1h30m"):
        schema.parse({"models": [model(keep_alive="soon")]})


def test_a_projector_takes_of_the_models_memory(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"")
    os.truncate(projector, 2**33)  # all that the machine has
    free = model(engine={})
    seeing = free | {"projector": {"path": str(projector)}}
    here = Machine(topology(((i,), 0) for i in range(2)), None, 2**33 + 2**31, 2**33 + 2**31)
    without, beside = (resolve(schema.parse({"models": [one]}), here)[0] for one in (free, seeing))
    eyes = ProjectorSource(builtin=True)
    assert (without.projector, beside.projector) == (eyes, ProjectorSource(path=projector))
    assert beside.options.cache_ram_bytes < without.options.cache_ram_bytes


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"builtin": True}, "projector.builtin is for the built-in model"),
        ({"path": "/nowhere/mmproj.gguf"}, r"models \(m\): projector: .*no file"),
    ],
)
def test_what_is_no_projector_is_refused(source: dict[str, Any], told: str) -> None:
    other = model(engine={}, projector=source, source={"path": str(BUILTIN_MODEL)})
    with pytest.raises(ConfigError, match=told):
        resolve(schema.parse({"models": [other]}), HERE)


@pytest.mark.parametrize(
    ("fields", "sees"),
    [
        ({}, True),
        ({"projector": {"builtin": True}}, True),
        ({"projector": False}, False),
        ({"source": {"path": str(BUILTIN_MODEL)}}, False),
        ({"engine": {"backend": "openvino", "n_slots": 1, "n_ctx_slot": 256}}, False),
    ],
)
def test_the_builtin_model_sees_by_default(fields: dict[str, Any], sees: bool) -> None:
    (resolved,) = resolve(schema.parse({"models": [model(**fields)]}), HERE)
    assert resolved.projector == (ProjectorSource(builtin=True) if sees else None)


def test_the_builtin_models_eyes_are_a_small_file_of_the_package() -> None:
    assert 0 < BUILTIN_PROJECTOR.stat().st_size < 2**21


def draft_of(path: object) -> dict[str, Any]:
    return {"draft": {"source": {"path": str(path)}}}


def test_a_draft_takes_of_the_models_memory() -> None:
    entries = [model(engine={}), model(engine=draft_of(BUILTIN_MODEL))]
    here = Machine(topology(((i,), 0) for i in range(2)), None, 2**28, 2**28)
    without, beside = (resolve(schema.parse({"models": [one]}), here)[0] for one in entries)
    assert (without.draft, beside.draft) == (None, ModelSource(path=BUILTIN_MODEL))
    assert beside.options.cache_ram_bytes < without.options.cache_ram_bytes


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_is_refused_as_a_draft_and_as_a_model(kind: str, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    write_head(head, kind)
    told = r"head\.gguf is (an EAGLE-3 head|a DFlash draft), which Corral does not support"
    for asked in ({"engine": draft_of(head)}, {"source": {"path": str(head)}}):
        with pytest.raises(ConfigError, match=told):
            resolve(schema.parse({"models": [model(**asked)]}), HERE)


def test_own_layers_are_of_the_models_file(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    write_random(path)
    asked = model(source={"path": str(path)}, engine={"draft": {"own_layers": True}})
    (resolved,) = resolve(schema.parse({"models": [asked]}), HERE)
    assert resolved.options.own_layers
    assert resolved.draft is None
    # Keys and values of two heads of 32 numbers, and states of 64, of which each is four bytes.
    assert slot_bytes(Model(path, vocab_only=True)) == 512 * 2 * 2 * 32 * 2 + 256 * 64 * 4


def test_a_model_without_own_layers_is_refused_at_the_start() -> None:
    asked = model(engine={"draft": {"own_layers": True}})
    with pytest.raises(ConfigError, match=r"own_layers: corral-demo-q8_0\.gguf has no prediction"):
        resolve(schema.parse({"models": [asked]}), HERE)


@pytest.mark.parametrize("draft", [{}, {"source": {"builtin": True}, "own_layers": True}])
def test_a_draft_is_one_thing(draft: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give exactly one of source and own_layers: true"):
        schema.parse({"models": [model(engine={"draft": draft})]})


def test_a_draft_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"models \(m\): engine.draft: .*no file"):
        resolve(schema.parse({"models": [model(engine=draft_of("/nowhere.gguf"))]}), HERE)


def test_a_draft_of_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    with pytest.raises(
        ConfigError, match=r"random\.gguf has another vocabulary: it has 512 tokens"
    ):
        resolve(schema.parse({"models": [model(engine=draft_of(path))]}), HERE)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"models": [model(engine={"cache_folder": "/c"})]}, "engine.cache_folder"),
        ({"models": [model(engine={"slot_folder": "/c"})]}, "engine.slot_folder"),
        ({"ingress": {"batch": {"folder": "/c"}}}, "ingress.batch.folder"),
        ({"ingress": {"ui": True}}, "ingress.ui: true"),
    ],
)
def test_no_data_at_rest_refuses_what_writes_it(more: dict[str, Any], named: str) -> None:
    args = {"models": [model()]} | more
    assert schema.parse(args | {"data_at_rest": True}).data_at_rest
    with pytest.raises(ConfigError, match=f"data_at_rest: false forbids .*{re.escape(named)}"):
        schema.parse(args | {"data_at_rest": False})
    if named.endswith("folder"):
        assert schema.parse(args | {"data_at_rest": "encrypted"}).data_at_rest == "encrypted"
    else:
        with pytest.raises(ConfigError, match="data_at_rest: encrypted forbids"):
            schema.parse(args | {"data_at_rest": "encrypted"})
