"""Users of `/v1/batches`: `locust -f loadtests/batch/locustfile.py --host URL --users 2 --run-time 5m`.

Each user uploads a file of --lines lines, makes a batch of it, looks how it goes every --poll seconds,
reads the answers, deletes the files, and begins again. The rows of type BATCH are the milliseconds from a
batch's creation to its end, and those of type LINE are BATCH divided by the file's lines. The other rows
are HTTP requests, by name. A batch that does not end as `completed`, or a line that is not answered exactly
once, is a failure of BATCH. A batch that runs when the test ends is cancelled.

Run it beside `loadtests/locustfile.py` to see what people who chat notice.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from http import HTTPStatus
from typing import Any

import gevent
from locust import HttpUser, events, task

WORDS_A_LINE = 40
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


@events.init_command_line_parser.add_listener
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Locust's own come first."""
    parser.add_argument("--lines", type=int, default=200, help="of one file")
    parser.add_argument("--line-tokens", type=int, default=32, help="generated for each line")
    parser.add_argument("--poll", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=20, help="of all that lines ask")
    parser.add_argument("--model", default="", help="its name; the server's only one if left out")
    parser.add_argument("--api-key", default="", env_var="CORRAL_API_KEY", is_secret=True)


def line(number: int, words: random.Random, model: str, max_tokens: int) -> dict[str, Any]:
    """One line of a file: a prompt that nobody has sent before."""
    prompt = " ".join(f"{words.randrange(10**4):04}" for _ in range(WORDS_A_LINE))
    body = {"prompt": prompt, "max_tokens": max_tokens}
    named = {"model": model} if model else {}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body | named,
    }


def wrong(batch: dict[str, Any], output: str, n_lines: int) -> str:
    """The problem with the end of a batch; nothing if each line was answered exactly once."""
    if batch["status"] != "completed":
        return f"The batch is {batch['status']}: {json.dumps(batch.get('errors'))}"
    if batch["request_counts"] != {"total": n_lines, "completed": n_lines, "failed": 0}:
        return f"Its counts are {batch['request_counts']}, of {n_lines} lines."
    answers = Counter(json.loads(answer)["custom_id"] for answer in output.splitlines())
    if answers != Counter(f"line-{i}" for i in range(n_lines)):
        return f"{n_lines} lines have {answers.total()} answers to {len(answers)} of them."
    return ""


class BatchOwner(HttpUser):
    """Somebody who has one batch at a time."""

    def on_start(self) -> None:
        """Get the key ready."""
        options: Any = self.environment.parsed_options
        self._options = options
        self._words = random.Random(f"{options.seed} {id(self)}")
        self._made: gevent.Greenlet | None = None  # the batch that runs, or is being made
        if options.api_key:
            self.client.headers["Authorization"] = f"Bearer {options.api_key}"

    def on_stop(self) -> None:
        """Leave nothing that goes on."""
        if self._made is None:
            return
        self._made.join()
        if self._made.successful():
            path = f"/v1/batches/{self._made.get()['id']}/cancel"
            with self.client.post(path, name="CANCEL", catch_response=True) as answer:
                if answer.status_code == HTTPStatus.BAD_REQUEST:  # it has just ended
                    answer.success()

    @task
    def batch(self) -> None:
        """One file, from its upload to its answers."""
        file = self._uploaded()
        began = time.perf_counter()
        self._made = gevent.spawn(self._make, file)  # goes on if Locust ends this task meanwhile
        ended = self._ended(self._made.get())
        took_ms = (time.perf_counter() - began) * 1000
        self._made = None
        kept = [ended[name] for name in ("output_file_id", "error_file_id") if ended.get(name)]
        output = self._output(ended)
        self._tell(took_ms, wrong(ended, output, self._options.lines))
        for name in (file, *kept):
            self._json("DELETE", f"/v1/files/{name}")

    def _uploaded(self) -> str:
        options = self._options
        lines = (
            json.dumps(line(i, self._words, options.model, options.line_tokens))
            for i in range(options.lines)
        )
        upload = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        made = self._json(
            "POST", "/v1/files", name="UPLOAD", files=upload, data={"purpose": "batch"}
        )
        return str(made["id"])

    def _make(self, file: str) -> dict[str, Any]:
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return self._json("POST", "/v1/batches", json=body)

    def _ended(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch as it is at its end."""
        while batch["status"] not in ENDED:
            gevent.sleep(self._options.poll)
            batch = self._json("GET", f"/v1/batches/{batch['id']}", name="LOOK")
        return batch

    def _output(self, ended: dict[str, Any]) -> str:
        name = ended.get("output_file_id")
        if not name:
            return ""
        answer = self.client.get(f"/v1/files/{name}/content", name="RESULTS")
        answer.raise_for_status()
        return str(answer.text)

    def _json(self, method: str, path: str, name: str = "", **fields: Any) -> dict[str, Any]:
        """Raises what Locust counts as the user's failure."""
        answer = self.client.request(method, path, name=name or path.split("/")[2], **fields)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def _tell(self, took_ms: float, error: str) -> None:
        lines = self._options.lines
        failure = RuntimeError(error) if error else None
        for kind, value in (("BATCH", took_ms), ("LINE", took_ms / lines)):
            self.environment.events.request.fire(
                request_type=kind,
                name=f"{lines} lines",
                response_time=value,
                response_length=0,
                exception=failure,
                context={},
            )
