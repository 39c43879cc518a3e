"""The benchmark of single passes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_app.store.builtin_model import BUILTIN_MODEL

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from loadtests.tune.paged_passes import paged_context, pass_s, report
from serve_app.kernels.llama.model import Model


def test_a_pass_begins_anew_each_time() -> None:
    context = paged_context(Model(BUILTIN_MODEL, vocab_only=True), 64, 1, "f16")
    try:
        assert all(pass_s(context, 8, depth) > 0 for depth in (0, 56, 0, 56))
    finally:
        context.close()


def test_the_table_has_medians_and_ratios_of_the_same_round() -> None:
    rounds = [{"f16": 0.1, "bf16": 0.05}, {"f16": 0.2, "bf16": 0.2}, {"f16": 0.3, "bf16": 0.15}]
    *_, row = report({(28, 4096): rounds}).splitlines()
    assert row == "| 28 | 4096 | 200 ms | 150 ms, 0.50 (0.50-1.00) |"


@pytest.mark.long
def test_it_runs_as_its_description_says() -> None:
    command = "loadtests.tune.paged_passes", "--model", str(BUILTIN_MODEL), "--rows", "1,4"
    more = "--depths", "0,32", "--cache-types", "f16", "--rounds", "1", "--threads", "1"
    done = subprocess.run(
        [sys.executable, "-m", *command, *more], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[-4:]] == [
        *("| 1", "| 4", "| 1", "| 4")
    ]
