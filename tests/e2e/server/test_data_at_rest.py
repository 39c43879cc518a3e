"""With `data_at_rest: false`, no prompt or answer is on any disk: docs/data-at-rest.md."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from loadtests.common import servers
from tests.e2e.conftest import Corral, model, short_folder, stopped_at_the_end

SECRET = "wombat-9431-in-the-cellar"


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest) -> Iterator[Corral]:
    served = [model(None, "demo", n_slots=2, n_ctx_slot=4096)]
    how = {"local": request.param == "local", "one_machine": request.param == "cluster"}
    with short_folder() as directory:
        started = Corral(directory, served, args={"data_at_rest": False}, **how)
        with stopped_at_the_end(started):
            yield started


def test_no_text_of_a_client_is_on_a_disk(server: Corral) -> None:
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}, 200),
        ("/v1/completions", {"prompt": "a", "logprobs": SECRET}, 400),
        ("/v1/completions", {"prompt": "a", "grammar": f"root ::= {SECRET}!"}, 400),
        ("/v1/completions", {"prompt": "a", SECRET: 1}, 200),
        ("/v1/completions", {"prompt": SECRET * 20_000}, 400),
        ("/v1/responses", {"input": SECRET, "background": True, "store": True}, 200),
        (f"/{SECRET}", {}, 404),
    ]
    for path, body, status in asked:
        answer = server.http.post(path, json={"model": "demo", "max_tokens": 4} | body)
        assert answer.status_code == status, answer.text
    assert server.http.post("/v1/completions", content=f"[{SECRET}").status_code == 400
    assert "html" not in server.http.get("/").headers["content-type"], "no page"
    replicas = server.pids("ray::ServeReplica")
    processes = replicas or server.pids("serve_app.")
    assert len(processes) > 1
    for pid in processes:
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    server.stop()  # and with it, all logs are written
    files = [path for path in server.directory.rglob("*") if path.is_file()]
    assert server.directory / servers.LOG in files
    assert len(files) > 10 or not replicas, "Ray's folder is there"
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
