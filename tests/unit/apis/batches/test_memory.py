"""A file of many lines needs no more memory than one of few."""

from __future__ import annotations

import subprocess
import sys

import pytest

N_FEW = 1_000
MOST_MORE_MIB = 8
WORK = """
import json, re, sys
from pathlib import Path
from serve_app.apis.batches.journal import BatchJournal, LineResult, line_of
from serve_app.apis.batches.preparation import lines

folder, n_lines = Path(sys.argv[1]), int(sys.argv[2])
body = {"prompt": "x" * 200, "max_tokens": 8}
with (folder / "in.jsonl").open("w") as file:
    for n in range(n_lines):
        line = {"custom_id": f"q{n}", "method": "POST", "url": "/v1/completions", "body": body}
        file.write(json.dumps(line) + "\\n")
run = BatchJournal(folder, "batch", folder / "in.jsonl")
while chunk := run.next_chunk():
    checked = lines({}, b"/v1/completions\\n" + chunk.data) if chunk.data else []
    assert run.note(chunk, checked) == []
last = None
while page := run.unanswered_lines(64, last):
    run.write([LineResult(one.n, True, line_of(one.custom_id, {"text": "y" * 200})) for one in page])
    last = page[-1]
assert run.counts() == (n_lines, n_lines, 0)
made = run.export()
with made["output"].open("rb") as file:
    assert sum(1 for _ in file) == n_lines
run.delete()
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def most_mib(folder: str, n_lines: int) -> float:
    """The most memory of a process that checks the lines, answers them, and writes the output."""
    command = [sys.executable, "-c", WORK, folder, str(n_lines)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return int(done.stdout) / 1024


@pytest.mark.parametrize("n_many", [12_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_lines_need_no_more_memory_than_few(
    tmp_path_factory: pytest.TempPathFactory, n_many: int
) -> None:
    few, many = (
        most_mib(str(tmp_path_factory.mktemp("lines")), n_lines) for n_lines in (N_FEW, n_many)
    )
    print(f"{few:.1f} MiB for {N_FEW} lines, {many:.1f} MiB for {n_many}")
    assert many - few < MOST_MORE_MIB
