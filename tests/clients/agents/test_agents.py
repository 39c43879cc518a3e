"""Coding agents as their users run them: each writes a file, and then another one in the same session."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from loadtests.common import processes
from tests.clients.agents.agents import AGENTS, CONTEXT, IMPATIENT, LIMIT_S, Agent
from tests.clients.agents.scripted import ANSWER
from tests.clients.environment import APART, FOLDER, NODE
from tests.e2e.conftest import Corral, model, short_folder, starts, stopped_at_the_end

_TIMEOUT_S = 220
LEAST_REUSED = 0.95
"""The part of a session's later prompts that comes from the cache."""
_ANSWERED = re.compile(r" (?:GET|HEAD|POST) (/\S*) (\d{3}) ")


start_for_module = pytest.fixture(starts, name="start_for_module", scope="module")


@pytest.fixture(scope="module")
def scripted(start_for_module: Callable[..., Corral]) -> Corral:
    """A server whose model follows the script of these tests."""
    models = [model(None, "demo", n_slots=3, n_ctx_slot=CONTEXT, max_waiting=16)]
    build = "tests.clients.agents.scripted:build"
    corral = start_for_module(models, one_machine=True, import_path=build)
    corral.wait_ready()
    return corral


@pytest.fixture(scope="module", params=[LIMIT_S / 20, 0], ids=["events", "silence"])
def slow(request: pytest.FixtureRequest) -> Iterator[tuple[Corral, float]]:
    """A scripted server that computes an agent's first prompt for longer than the limit. With it come the
    seconds between events of a silent stream: 20 in the limit as by default, or 0 for none."""
    models = [model(None, "demo", n_slots=2, n_ctx_slot=CONTEXT, max_waiting=16)]
    build = "tests.clients.agents.scripted:build"
    with short_folder() as directory:
        server = Corral(
            directory,
            models,
            one_machine=True,
            import_path=build,
            sse_ping_interval_s=request.param,
        )
        with stopped_at_the_end(server):
            yield server, request.param


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An agent's folder. Programs that it leaves behind, as Cline does, end with the test."""
    yield tmp_path
    processes.send(tmp_path, signal.SIGKILL)


@pytest.mark.timeout(3 * _TIMEOUT_S)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_writes_files(scripted: Corral, agent: Agent, folder: Path) -> None:
    run = _runner(agent, scripted.url, folder)
    if agent.prepare:
        _succeed(run(agent.prepare, ""))
    for number, command in enumerate((agent.first, agent.second), 1):
        n_logged, before = len(scripted.log), _prompt_tokens(scripted)
        task = f"Create the file hello-{number}.txt with the text CORRAL-{number}"
        _succeed(run(command, task))
        assert (folder / "work" / f"hello-{number}.txt").read_text().strip() == f"CORRAL-{number}"
        refused = [
            place for place in _ANSWERED.findall(scripted.log[n_logged:]) if place[1] >= "400"
        ]
        assert refused == []
        computed, cached = (
            after - earlier for after, earlier in zip(_prompt_tokens(scripted), before, strict=True)
        )
        if number == 2 and agent.continues:
            assert cached >= LEAST_REUSED * (computed + cached), (computed, cached)


@pytest.mark.timeout(3 * _TIMEOUT_S)
@pytest.mark.parametrize("agent", IMPATIENT, ids=lambda agent: agent.name)
def test_an_agent_waits_for_a_long_prompt_while_events_come(
    slow: tuple[Corral, float], agent: Agent, folder: Path
) -> None:
    """Without events it gives up, so computing outlasts the agent's limit."""
    server, interval_s = slow
    run = _runner(agent, server.url, folder)
    done = run(agent.first, "Greet me.")
    assert (ANSWER in done.stdout) == (interval_s > 0), done.stdout + done.stderr


def _runner(
    agent: Agent, url: str, folder: Path
) -> Callable[[Sequence[str], str], subprocess.CompletedProcess[str]]:
    """Write the agent's files; the function returned runs one of its commands with a task."""
    program = agent.first[0]
    home, work = folder / "home", folder / "work"
    environment = _environment(agent, url, home) | {processes.TAG: str(folder)}
    left_out = agent.name in APART and not (FOLDER / agent.name).is_dir()
    if left_out or (found := shutil.which(program, path=environment["PATH"])) is None:
        pytest.skip(f"{program} is not here: make test-clients installs it where it can")
    assert Path(found).is_relative_to(FOLDER), f"{found} is not of make test-clients"
    home.mkdir()
    work.mkdir()
    for name, text in agent.files.items():
        path = work / name[2:] if name.startswith("./") else home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(url=url))

    def run(command: Sequence[str], task: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [word.format(url=url, task=task) for word in command],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    return run


def _succeed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def _environment(agent: Agent, url: str, home: Path) -> dict[str, str]:
    """The agent's own variables, and the folders of clients before all others."""
    folders = [FOLDER / agent.name / "bin", NODE / "node_modules" / ".bin", FOLDER / "bin"]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    own = {name: value.format(url=url) for name, value in agent.environment.items()}
    return {"HOME": str(home), "PATH": path} | own


def _prompt_tokens(server: Corral) -> tuple[int, int]:
    """The prompt tokens that the engine has computed, and those that it had cached."""
    stats = server.stats()
    return stats["tokens"]["prompt_tokens"], stats["tokens"]["cached_tokens"]
