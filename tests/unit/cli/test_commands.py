"""The commands, by Typer's runner: options, help, errors, and what they print."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from serve_app import __version__
from serve_app.base.errors import ConfigError
from serve_app.cli import live, main
from serve_app.cli import serve as server
from serve_app.cli.config_file import ServeOptions
from serve_app.cli.main import app
from serve_app.cli.measure import bench, benchmark, capacity, tune
from serve_app.config import schema
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.documents.options import FORWARDED
from tests.unit.cli.conftest import Told

RUN = CliRunner()
COMMANDS = {
    "serve",
    "config",
    "check",
    "hash-keys",
    "chat",
    "ps",
    "stats",
    "top",
    "bench",
    "tune",
    "capacity",
    "batch",
    "usage",
    "keys",
}


def output(*arguments: str, status: int = 0, **environment: str) -> str:
    """What a command prints, on both channels."""
    done = RUN.invoke(app, [*arguments], env={"COLUMNS": "200", "NO_COLOR": "1", **environment})
    assert done.exit_code == status, done.output
    return done.output


def test_what_the_system_refuses_is_one_line() -> None:
    said = output("config", f"/tmp/{'x' * 300}.gguf", status=1)
    assert "File name too long" in said
    assert "Traceback" not in said


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "closed" / "m.gguf"
    model.parent.mkdir()
    model.touch()
    model.parent.chmod(0)
    user = os.geteuid()
    try:
        if not user:
            tmp_path.chmod(0o755)
            os.seteuid(65534)  # root may enter all
        said = output("config", str(model), status=1)
    finally:
        os.seteuid(user)
    assert said.splitlines() == [f"{model}: Permission denied"]


def test_every_command_has_help_with_an_example() -> None:
    group = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    assert set(commands) == COMMANDS
    for name, command in commands.items():
        assert command.help, name
        if name not in FORWARDED:  # programs have their own
            assert "Example" in command.help, name
            assert f"corral {name}" in command.help, name


def test_help_lists_the_commands() -> None:
    said = output("--help")
    assert all(f" {name} " in said for name in COMMANDS)
    assert output("--version") == f"corral {__version__}\n"


def test_help_imports_nothing_that_is_slow() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from serve_app.cli.main import app\n"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0\n"
        "slow = {'ray', 'fastapi', 'llama_cpp', 'numpy', 'huggingface_hub', 'yaml'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_completion_completes() -> None:
    said = output(_CORRAL_COMPLETE="complete_bash", COMP_WORDS="corral c", COMP_CWORD="1").split()
    assert said == ["config", "check", "chat", "capacity"]


def test_config_prints_what_serve_would_use(tmp_path: Path) -> None:
    model, keys = tmp_path / "m.Q4_0.gguf", tmp_path / "keys.yaml"
    model.touch()
    keys.touch()
    sizes = ["--slots", "3", "--context", "512", "--threads", "2", "--port", "8123"]
    access = ["--host", "0.0.0.0", "--api-key-file", str(keys)]
    file = tmp_path / "config.yaml"
    file.write_text(output("config", str(model), str(model), *sizes, *access))
    found = schema.load(file)
    assert [one.id for one in found.models] == ["m.Q4_0", "m.Q4_0-2"]
    for one in found.models:
        assert one.source.path == model
        assert (one.engine.n_slots, one.engine.n_ctx_slot, one.engine.threads) == (3, 512, 2)
    assert found.ingress.api_key_file == keys
    assert yaml.safe_load(file.read_text())["http_options"] == {"host": "0.0.0.0", "port": 8123}


def test_config_of_nothing_is_the_built_in_model(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(output("config"))
    (model,) = schema.load(file).models
    assert model.source.builtin
    assert model.engine == schema.EngineConfig()
    theirs = yaml.safe_load(Path("serve_config.yaml").read_text())
    ours = yaml.safe_load(file.read_text())
    assert ours["http_options"] == theirs["http_options"]
    for name in ("name", "route_prefix", "import_path"):
        assert ours["applications"][0][name] == theirs["applications"][0][name]


def test_options_come_from_the_environment_too() -> None:
    said = output("config", CORRAL_PORT="9123", CORRAL_SLOTS="5", CORRAL_ALLOW_ANONYMOUS="1")
    found = yaml.safe_load(said)
    assert found["http_options"]["port"] == 9123
    args = found["applications"][0]["args"]
    assert args["models"][0]["engine"] == {"n_slots": 5}
    assert args["ingress"] == {"allow_anonymous": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "no.gguf"], "There is no file no.gguf."),
        (["config", "--api-key-file", "no.yaml"], "--api-key-file: there is no file no.yaml."),
        (["serve", "no.gguf"], "There is no file no.gguf."),
        (["serve", "--config", "no.yaml"], "no.yaml: No such file or directory"),
        (["serve", "m.gguf", "--config", "no.yaml"], "--config cannot be combined with MODEL:"),
        (["serve", "--slots=2", "--config=no"], "--config cannot be combined with --slots:"),
        (["serve", "--port", "1", "--config", "no.yaml"], "no.yaml: No such file or directory"),
        (["check", "no.yaml"], "no.yaml: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str) -> None:
    said = output(*arguments, status=1)
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_a_file_is_served_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CORRAL_PORT=8280 make serve`, and `make serve PORT=8280`."""
    told: list[object] = []

    def run(*_: object, http: Mapping[str, str | int], **__: object) -> int:
        told.append(http)
        return 0

    monkeypatch.setattr(server, "run", run)
    output("serve", "--config", "serve_config.yaml", CORRAL_PORT="8280")
    output("serve", "--config", "serve_config.yaml", "--port", "8000", "--host", "::1")
    output("serve", "--config", "serve_config.yaml")
    assert told == [{"port": 8280}, {"port": 8000, "host": "::1"}, {}]
    said = output("serve", "--config", "serve_config.yaml", CORRAL_SLOTS="3", status=1)
    assert said.startswith("--config cannot be combined with CORRAL_SLOTS:")


@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["config", "--slots", "many"]])
def test_options_of_the_wrong_kind_are_refused(arguments: list[str]) -> None:
    assert "Invalid value" in output(*arguments, status=2)


def test_check_names_the_models_or_what_is_wrong(tmp_path: Path) -> None:
    assert output("check", "serve_config.yaml") == (
        "serve_config.yaml is valid. Models: corral-demo\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text(Path("serve_config.yaml").read_text().replace("engine: {}", "engine: {x: 1}"))
    assert "config.yaml:17: models.0.engine.x: there is no such field" in output(
        "check", str(file), status=1
    )


def test_serve_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[ServeOptions, Path | None, bool, bool]] = []

    def run(
        options: ServeOptions,
        config: Path | None,
        _: object,
        *,
        cluster: bool,
        verbose: bool,
        http: Mapping[str, str | int],
    ) -> int:
        assert not http
        seen.append((options, config, cluster, verbose))
        return 3

    monkeypatch.setattr(server, "run", run)
    output("serve", "a.gguf", "b.gguf", "--context", "64", "-v", status=3)
    output("serve", "--config", "c.yaml", "--cluster", status=3)
    assert seen == [
        (ServeOptions(models=("a.gguf", "b.gguf"), context=64), None, False, True),
        (ServeOptions(), Path("c.yaml"), True, False),
    ]


def test_a_configuration_without_applications_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: []")
    with pytest.raises(ConfigError, match="applications"):
        server.read_config(file)


def chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


def test_chat_answers_one_prompt(told: Told) -> None:
    cards = [("encoder", ["embeddings"]), ("ranker", ["rerank"]), ("first", ["vision"])]
    served = [{"id": name, "capabilities": able} for name, able in cards]
    told.json("/v1/models", {"data": [*served, {"id": "second"}]})
    told.stream(
        "/v1/chat/completions",
        chunk(role="assistant"),
        chunk(reasoning_content="Hm."),
        chunk(content="Hello, "),
        chunk(content="**you**"),
        chunk("stop"),
        {"choices": [], "usage": {"completion_tokens": 4}},
    )
    arguments = ["--url", f"{told.url}/v1", "--api-key", "secret", "--max-tokens", "9"]
    assert output("chat", "Hi", "--system", "Be kind.", *arguments) == "Hello, **you**\n"
    path, headers, body = told.asked[-1]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "first",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
    }


def test_chat_converses(told: Told) -> None:
    told.json("/v1/models", {"data": [{"id": "m"}]})
    told.stream("/v1/chat/completions", chunk(content="Yes."), chunk("stop"))
    lines = "One?\nTwo?\n/model\n/new\nThree?\n/nonsense\n/quit\n"
    done = RUN.invoke(app, ["chat", "--url", told.url, "--model", "m"], input=lines)
    assert done.exit_code == 0, done.output
    said = [[m["content"] for m in body["messages"]] for _, _, body in told.asked if body]
    assert said == [["One?"], ["One?", "Yes.", "Two?"], ["Three?"]]
    assert "/system TEXT" in done.output


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (401, {"error": {"message": "No."}}, "No. (give a key: --api-key, or CORRAL_API_KEY)"),
        (503, {"error": {"message": "Not yet."}}, "Not yet. (HTTP 503)"),
        (500, {"error": "plain"}, "plain (HTTP 500)"),
        (200, ["no object"], "answered with JSON that is not an object"),
    ],
)
def test_what_a_server_refuses_is_said(
    status: int, content: object, message: str, told: Told
) -> None:
    told.json("/v1/models", content, status)
    assert message in output("chat", "Hi", "--url", told.url, status=1)


def test_an_error_within_a_stream_is_said(told: Told) -> None:
    told.stream("/v1/chat/completions", chunk(content="a"), {"error": {"message": "It broke."}})
    said = output("chat", "Hi", "--url", told.url, "--model", "m", status=1)
    assert "It broke.\n" in said


@pytest.mark.parametrize("command", ["chat", "ps", "stats", "top"])
def test_a_server_that_is_not_there_is_said(command: str) -> None:
    said = output(command, "--url", "http://127.0.0.1:9", status=1)
    assert said.startswith("No server answers at http://127.0.0.1:9: ")


def replica(**changed: object) -> dict[str, Any]:
    return {
        "model": "m",
        "state": "up",
        "node": "0123456789abcdef",
        "cores": [0, 1, 2, 5],
        "threads": 4,
        "n_slots": 8,
        "n_ctx_slot": 4096,
        "running": 2,
        "waiting": 1,
        "wait_s": 1.25,
        "generated_per_s": 81.04,
        "prompt_per_s": 512.0,
        "hits": 0.5,
        "turns": [0.42, 0.3],
        "ttft": [120.0, 2500.0, 3000.0, 10],
        "itl": [24.6, None, None, 10],
        "slots": {"0": ["decode", 1, 1, 1, 0], "1": ["prefill", 0, 1, 0, 9], "2": ["idle"]},
        **changed,
    }


def test_ps_and_stats_are_tables_of_what_live_tells(told: Told) -> None:
    models = {"m": {"states": {}}, "n": {"states": {"STARTING": 1, "RUNNING": 0}}}
    view = {"models": models, "replicas": {"r1": replica()}, "events": {}}
    later = {"replicas": {"r1": {"running": 3, "cores": None, "hits": None}}}
    told.stream("/v1/live", view, later)
    header, row, missing = output("ps", "--url", told.url).splitlines()
    assert header.split() == [
        *("model", "replica", "state", "slots", "context", "threads", "cores", "node")
    ]
    assert row.split() == ["m", "r1", "up", "2/8", "4,096", "4", "0-2,", "5", "01234567"]
    assert missing.split() == ["n", "1", "starting"]
    told.stream("/v1/live", view, later, {"replicas": {"r1": {"waiting": 4}}})
    *_, row, _ = output("stats", "--url", told.url).splitlines()
    figures = "m 3/8 4 81.0 512 - 120 ms / 2.50 s 25 ms / - 1.2 s"
    assert row.split() == figures.split()
    shown = json.loads(output("stats", "--url", told.url, "--json"))
    assert shown["replicas"]["r1"]["waiting"] == 4
    assert "cores" not in shown["replicas"]["r1"]


def test_figures_fit_a_terminal() -> None:
    """Of a busy server, and with the built-in model's name."""
    busy = replica(model="corral-demo", running=16, n_slots=16, ttft=[120.0, 250.0, 300.0, 10])
    said = io.StringIO()
    Console(file=said, width=80).print(live.statistics({"models": {}, "replicas": {"r1": busy}}))
    lines = said.getvalue().splitlines()
    assert "120 / 250 ms" in lines[2]
    assert not any("…" in line for line in lines)


def test_top_shows_slots_and_what_happened(told: Told) -> None:
    event = {"n": 7, "at": 1.0, "kind": "preempted", "model": "m", "replica": "r1", "count": 2}
    view = {"models": {"m": {"states": {}}}, "replicas": {"r1": replica()}, "events": {"7": event}}
    told.stream("/v1/live", view, {"at": 2})
    said = output("top", "--url", told.url, "--frames", "2")
    assert "DP." in said
    assert "42%" in said
    assert "m: 2 preempted r1" in said


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("batch", "serve_app.plugins.batch"),
        ("bench", "serve_app.cli.measure.bench"),
        ("capacity", "serve_app.cli.measure.capacity"),
        ("tune", "serve_app.cli.measure.tune"),
    ],
)
def test_commands_that_are_programs_get_all_arguments(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def run(module: str, arguments: Sequence[str]) -> int:
        seen.append((module, [*arguments]))
        return 0

    monkeypatch.setattr(main, "_run", run)
    output(command, "--model=x", "--help")
    assert seen == [(module, ["--model=x", "--help"])]


def test_measurements_have_what_newcomers_leave_out() -> None:
    assert bench.parse_args([]).model == BUILTIN_MODEL
    args = capacity.parse_args([])
    assert (args.url, args.slo) == (
        "http://127.0.0.1:8000",
        capacity.parse_slo("ttft_p95=2s,itl_p95=150ms"),
    )
    args = capacity.parse_args(["--configs", "a.yaml", "--slo=itl_p50=1s"])
    assert (args.configs, args.slo) == ([Path("a.yaml")], capacity.parse_slo("itl_p50=1s"))


def test_a_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    missing = "pandas"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    monkeypatch.setattr(main, "_run", lambda *_: 0)
    output("batch", "--help")
    said = output("batch", "in", "out", status=1)
    assert "needs pandas." in said
    assert "pip install 'corral[batch]'" in said


class _ReadyError(Exception):
    """Its argument is a parser that knows all options."""


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("serve_app.cli.measure.bench", "parse_args"),
        ("serve_app.cli.measure.capacity", "parse_args"),
        ("serve_app.cli.measure.tune", "parse_args"),
        ("serve_app.plugins.batch.__main__", "parse_args"),
    ],
)
def test_every_option_of_a_forwarded_command_says_what_it_is(
    module: str, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _ReadyError(parser)

    program = importlib.import_module(module)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(_ReadyError) as ready:
        getattr(program, function)([])
    (parser,) = ready.value.args
    assert len(parser._actions) > 5
    assert [action.dest for action in parser._actions if not action.help] == []
    assert f"\n\n    {parser.prog} " in parser.description  # an example
    parser.print_help()
    said = capsys.readouterr().out
    assert f"Usage: {parser.prog} [OPTIONS] " in said
    assert "╭─ Arguments" in said
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            assert (action.option_strings or [action.dest.upper()])[-1] in said


def test_a_model_is_named_as_in_the_other_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    for program in (bench, tune):
        for words in ([str(file), "--threads=1"], ["--threads=1", "--model", str(file)]):
            assert program.parse_args(words).model == file
    assert capacity.parse_args(["m"]).model == capacity.parse_args(["--model=m"]).model == "m"
    assert capacity.parse_args([]).model == ""
    with pytest.raises(SystemExit, match="2"):
        tune.parse_args([])
    assert "MODEL is needed" in capsys.readouterr().err
    assert benchmark.model_file(file) == file
    for program in (bench, tune):
        with pytest.raises(SystemExit, match="There is no file no"):
            program.main(["no.gguf"])


def test_bench_is_the_program_itself() -> None:
    assert main._run("serve_app.cli.measure.bench", ["--help"]) == 0


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_usage_is_shown_by_day(form: str, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 20_000 * 86400 + 5.0)
    query = "start_time=1727913600&bucket_width=1d&limit=2&group_by=model"
    row = {"num_model_requests": 1200, "input_tokens": 5, "input_cached_tokens": 3}
    result = {
        **row,
        "output_tokens": 2,
        "compute_s": 1.25,
        "joules": 70.0,
        "cost": 0.5,
        "model": "m",
    }
    page = {"data": [{"start_time": 1727913600, "results": [result]}]}
    told.json(f"/v1/usage?{query}", page)
    told.answers[f"/v1/usage?{query}&format=csv"] = 200, "text/csv", b"start,model\n"
    shape = [] if form == "table" else [f"--{form}"]
    printed = output("usage", "--days", "2", "--by", "model", "--url", told.url, *shape)
    if form == "table":
        (line,) = printed.splitlines()[1:]
        assert line.split() == ["2024-10-03", "m", "1,200", "5", "3", "2", "1.2", "70", "0.5"]
    else:
        assert printed == {"json": f"{json.dumps(page)}\n", "csv": "start,model\n"}[form]
    assert "'who' is none of key" in output("usage", "--by", "who", status=1)


def test_keys_are_made_listed_and_revoked(told: Told) -> None:
    told.json("/v1/keys", {"key": "sk-1"})
    limits = ["tokens_per_minute=60", "models=[a, 'b*']", "--label", "team=x", "--days", "2"]
    assert output("keys", "create", "ben", *limits, "--url", told.url) == "sk-1\n"
    _, _, sent = told.asked.pop()
    assert sent.pop("expires") > "2026"
    labels = {"team": "x"}
    assert sent == {"name": "ben", "tokens_per_minute": 60, "models": ["a", "b*"], "labels": labels}
    told.json("/v1/keys/a%2Bb/rotate", {"key": "sk-2"})
    assert output("keys", "rotate", "a+b", "--url", told.url) == "sk-2\n"
    told.json("/v1/keys/ben", {"deleted": True})
    assert "not valid any more" in output("keys", "revoke", "ben", "--url", told.url)
    assert told.asked[-1][2] == "DELETE"
    entry = {"object": "api_key", "name": "ben", "created": "2026-05-01T10:00:00Z"}
    page = {"data": [{"name": "op", "admin": True}, {**entry, "labels": labels}]}
    told.json("/v1/keys", page)
    rows = [line.split() for line in output("keys", "list", "--url", told.url).splitlines()]
    assert rows[1:] == [
        ["op", "by", "the", "file", "never", "admin:", "True"],
        ["ben", "2026-05-01", "never", "team=x"],
    ]
    assert json.loads(output("keys", "list", "--json", "--url", told.url)) == page
    assert "write NAME=VALUE" in output("keys", "create", "ben", "x", status=1)
