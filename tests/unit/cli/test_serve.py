"""What `corral serve` says, without a server."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from rich.console import Console

from serve_app.base.errors import ConfigError
from serve_app.base.progress import Stage
from serve_app.cli import chat, config_file, screen, serve
from serve_app.cli.config_file import ServeOptions
from serve_app.cli.screen import Screen, Served
from serve_app.run import program


def served(**changed: Any) -> Served:
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 8000,
        "key_file": None,
        "allow_anonymous": False,
        "log": Path("/logs/server-8000.log"),
        "ray_logs": "/tmp/ray/session/logs",
    }
    return Served(**(fields | changed))


def model(n_slots: int, n_ctx_slot: int, n_replicas: int = 1) -> dict[str, Any]:
    n_ctx = n_slots * min(n_ctx_slot, 4096)
    sizes = {"n_slots": n_slots, "n_ctx_slot": n_ctx_slot, "n_ctx": n_ctx}
    engine = {**sizes, "compute": {"threads": 4}}
    replicas = [{"engine": engine, "placement": "because; of that"}] * n_replicas
    return {"id": "m", "replicas": replicas}


def card(n_ctx_train: int, **more: Any) -> dict[str, Any]:
    return {"id": "m", "meta": {"n_ctx_train": n_ctx_train}, "status": {"value": "loaded"}, **more}


def test_the_summary_names_models_that_nobody_asked_for_or_that_are_left_out() -> None:
    absent: list[dict[str, Any]] = [{"id": name, "replicas": []} for name in ("asleep", "cut")]
    cut = {"id": "cut", "meta": None, "status": {"value": "unloaded", "reason": "it is cut"}}
    asleep = {"id": "asleep", "status": {"value": "unloaded"}, "meta": {"n_ctx_train": 1}}
    lines = screen.summary(served(), [*absent, model(8, 32_768)], [asleep, cut])
    assert "Model     asleep: starts when somebody asks for it" in lines
    assert "Model     cut: left out: it is cut" in lines
    assert "Model     m: 8 slots that share 32,768 tokens, 4 threads" in lines


def test_the_summary_says_that_a_key_is_missing() -> None:
    lines = screen.summary(served(key_file=Path("/keys.yaml")), None, [])
    assert "Model     All can answer. Set CORRAL_API_KEY to see them here." in lines


def test_the_summary_says_where_who_and_what() -> None:
    lines = screen.summary(served(), [model(8, 32_768)], [])
    assert lines == [
        "Address   http://127.0.0.1:8000/v1",
        "          Only for this machine. --host 0.0.0.0 --api-key-file FILE opens it to others.",
        "Page      http://127.0.0.1:8000/",
        "Model     m: 8 slots that share 32,768 tokens, 4 threads",
        "          because",
        "          of that",
        "          The longest request: 32,768 tokens, prompt and answer together.",
        "Logs      /logs/server-8000.log",
        "          /tmp/ray/session/logs (Ray's own)",
        "Ctrl-C stops it. In another terminal, try: corral chat, corral top",
    ]
    assert not any("Warning" in line for line in lines)


@pytest.mark.parametrize(
    ("access", "said"),
    [
        ({"key_file": Path("/keys.yaml")}, "Clients need an API key of /keys.yaml."),
        ({"allow_anonymous": True}, "Clients need no key."),
    ],
)
def test_the_summary_says_who_may_come_in(access: dict[str, Any], said: str) -> None:
    first, second, third, *_ = screen.summary(served(host="0.0.0.0", **access), [], [])
    assert first == "Address   http://127.0.0.1:8000/v1"
    assert second.endswith(":8000/v1 from other machines")
    assert said in third


def test_the_summary_names_no_address_for_others_where_there_are_no_keys() -> None:
    lines = screen.summary(served(host="0.0.0.0"), [], [])
    assert lines[1].endswith("Only for this machine. --api-key-file FILE opens it to others.")
    assert not any("from other machines" in line for line in lines)


def test_a_port_that_is_taken_is_said_before_anything_is_started(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config.write_text(f"http_options: {{host: 127.0.0.1, port: {port}}}\napplications: []\n")
        with pytest.raises(ConfigError, match=f"Another program listens on port {port}"):
            serve.run(
                ServeOptions(), config, Console(file=io.StringIO()), cluster=False, verbose=False
            )
    config.write_text("http_options: {host: 192.0.2.77}\napplications: []\n")
    with pytest.raises(ConfigError, match=r"cannot listen on port 8000 of 192\.0\.2\.77"):
        serve.run(ServeOptions(), config, Console(file=io.StringIO()), cluster=False, verbose=False)


def test_replicas_are_counted() -> None:
    lines = screen.summary(served(), [model(8, 4096, 2)], [])
    assert "Model     m: 2 replicas, each 8 slots that share 32,768 tokens, 4 threads" in lines
    lines = screen.summary(served(), [model(1, 4096, 1)], [])
    assert "Model     m: 1 slot of 4,096 tokens, 4 threads" in lines


@pytest.mark.parametrize(
    ("capability", "does"),
    [("embeddings", "makes embeddings of"), ("rerank", "ranks"), ("classify", "classifies")],
)
def test_models_that_write_no_text_have_no_slots_and_no_answers(capability: str, does: str) -> None:
    cards = [card(512, capabilities=[capability])]
    served_model = model(8, 512)
    served_model["replicas"][0]["engine"]["compute"]["threads"] = 1
    lines = screen.summary(served(), [served_model], cards)
    at = lines.index(f"Model     m: {does} texts of up to 512 tokens, 1 thread")
    assert lines[at + 1 : at + 4] == [
        *("          because", "          of that"),
        "Logs      /logs/server-8000.log",
    ]


@pytest.mark.parametrize(
    ("n_slots", "n_ctx_slot", "trained", "said"),
    [
        (8, 2048, 2048, "The model was trained for 2,048 tokens, so a request has no more."),
        (8, 2048, 1024, "Warning: the model was trained for 1,024 tokens only."),
        (8, 8192, 2048, "Warning: the model was trained for 2,048 tokens only."),
        (8, 2048, 32768, "--slots 4 --context 4096 takes the same memory."),
        (8, 1024, None, "--slots 2 --context 4096 takes the same memory."),
        (3, 2048, 32768, "--slots 1 --context 4096 takes the same memory."),
        (8, 1024, 2048, "--slots 4 --context 2048 takes the same memory."),
        (1, 1024, 8192, "engine.cache_type_v: q8_0"),
    ],
)
def test_little_context_is_a_warning_with_a_way_out(
    n_slots: int, n_ctx_slot: int, trained: int | None, said: str
) -> None:
    cards = [] if trained is None else [card(trained)]
    lines = screen.summary(served(), [model(n_slots, n_ctx_slot)], cards)
    assert any(said in line for line in lines), lines
    warned = any("Warning: " in line for line in lines)
    assert warned is (trained != n_ctx_slot)
    if n_slots == 1:
        assert not any("--slots" in line for line in lines)


def test_agents_have_a_way_to_longer_requests() -> None:
    lines = screen.summary(served(), [model(8, 32_768)], [card(40_960)])
    assert "          --context 40960 allows longer requests, for more memory." in lines
    lines = screen.summary(served(), [model(8, 32_768)], [card(32_768)])
    assert not any("--context" in line for line in lines)


def test_without_a_terminal_each_step_is_a_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Screen(console) as shown:
        shown.step("Starting Ray")
        shown.step("Starting Ray")
        shown.stage("m", Stage("loading", 0.5))
        shown.stage("m", Stage("loading", 1.0))
        shown.stage("m", Stage("measuring", limit_s=27.0))
        shown.clear()
        shown.say("A line that is longer than the console is wide stays one [line].")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "Starting Ray ...",
        "m: loading ...",
        "m: measuring (at most 27 s) ...",
        "A line that is longer than the console is wide stays one [line].",
    ]


def test_on_a_terminal_there_are_bars() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Screen(console, clock=lambda: now[0]) as shown:
        shown.step("Starting Ray")
        shown.step("Starting the server")
        shown.stage("m", Stage("loading", 0.25))
        step, loading = shown._progress.tasks
        assert (step.description, step.total) == ("Starting the server", None)
        assert (loading.description, loading.completed) == ("m: loading", 0.25)
        shown.stage("m", Stage("measuring", limit_s=20.0))
        now[0] = 5.0
        shown.stage("m", Stage("measuring", limit_s=20.0))
        assert shown._progress.tasks[1].completed == 0.25
        now[0] = 50.0
        shown.stage("m", Stage("measuring", limit_s=20.0))
        assert shown._progress.tasks[1].completed == 0.99
        shown.clear()
        assert shown._progress.tasks == []


def test_events_come_as_they_are_written() -> None:
    reading, writing = os.pipe()
    events = SimpleQueue[Any]()
    reader = threading.Thread(target=serve._read_events, args=(reading, events), daemon=True)
    reader.start()
    os.write(writing, b'{"kind": "ray"}\n{"kind": ')
    assert events.get(timeout=10) == {"kind": "ray"}
    assert events.empty()
    os.write(writing, b'"serve"}\n')
    assert events.get(timeout=10) == {"kind": "serve"}
    os.close(writing)
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Traceback\n  File x\nserve_app.errors.ConfigError: models (m): bad\n", "models (m): bad"),
        ("one\ntwo\n\nthree\nfour", "two\nthree\nfour"),
        ("Deploying app 'corral' failed with exception:\nmodels (m): bad", "models (m): bad"),
        ("", "The application could not be started."),
    ],
)
def test_a_failed_start_is_said_without_tracebacks(message: str, said: str) -> None:
    assert serve._problem(message) == said


def test_an_operators_key_looks_at_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [{"key": "a"}, {"key": "b", "admin": True}]}))
    assert serve._any_key(file) == "b"
    file.write_text(json.dumps({"keys": [{"sha256": "a" * 64}]}))
    assert serve._any_key(file) is None
    file.write_text("keys: 3")
    assert serve._any_key(file) is None
    assert serve._any_key(None) is None


@pytest.mark.parametrize(
    ("host", "name"),
    [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7")],
)
def test_the_address_is_one_that_this_machine_reaches(host: str, name: str) -> None:
    assert screen.local_name(host) == name


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("a", ""),
        ("a\n\nb", "a\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("a\n\nb\n\n", "a\n\nb\n\n"),
    ],
)
def test_markdown_is_rendered_by_whole_blocks(text: str, done: str) -> None:
    assert chat.split_blocks(text) == (done, text.removeprefix(done))


def test_markdown_on_a_terminal_is_rendered() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with chat.MarkdownWriter(console) as writer:
        for piece in ("Hm", "."):
            writer.write("reasoning", piece)
        for piece in ("# Ti", "tle\n\nSome **bo", "ld** text\n\n- a\n- b"):
            writer.write("text", piece)
    shown = Console(file=io.StringIO(), width=60)
    shown.print(console.file.getvalue())  # type: ignore[attr-defined]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "**" not in said.replace("Some **bo", "")
    assert "Title" in said
    assert " • " in said


def test_an_answer_is_summed_up() -> None:
    answer = chat.ChatAnswer("text", n_tokens=11, finish="length", first_s=0.5, took_s=2.5)
    assert (
        answer.summary
        == "11 tokens, 5.0 tokens/s, first after 0.50 s, cut off: no room for more tokens"
    )


PLAIN = config_file.document(ServeOptions())
(APPLICATION,) = PLAIN["applications"]


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        (PLAIN, True),
        (PLAIN | {"grpc_options": {"port": 9100}}, True),
        (PLAIN | {"logging_config": {"encoding": "JSON"}}, False),
        (PLAIN | {"applications": []}, False),
        (PLAIN | {"applications": [APPLICATION, APPLICATION | {"name": "other"}]}, False),
        (PLAIN | {"applications": [APPLICATION | {"import_path": "mine:app"}]}, False),
        (PLAIN | {"applications": [APPLICATION | {"runtime_env": {"env_vars": {}}}]}, False),
        (PLAIN | {"applications": [APPLICATION | {"deployments": []}]}, False),
    ],
)
def test_only_a_file_that_says_no_more_is_built_without_serve(
    content: dict[str, Any], plain: bool
) -> None:
    assert program.is_plain(content) is plain


def test_our_own_files_are_built_without_serve() -> None:
    content = serve.read_config(Path(__file__).parents[3] / "serve_config.yaml")
    assert program.is_plain(content)
