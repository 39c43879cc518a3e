"""Tuning of a tiny model: real files of other formats, read and served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.cli.measure import quality
from serve_app.cli.measure.benchmark import BenchmarkError
from serve_app.cli.measure.tune import main


@pytest.mark.long
def test_formats_are_made_read_and_served(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--sequences 1,2 --users 2 --prompt-tokens 8 --max-tokens 8 --rounds 1 --threads 1"
    folder, report = tmp_path / "files", tmp_path / "tune.json"
    places = ["--folder", str(folder), "--json", str(report)]
    more = ["--formats", "Q8_0,F16", "--windows", "1", "--worse", "9"]
    main(["--model", str(tiny_gguf), *sizes.split(), *more, *places])
    said = capsys.readouterr().out
    assert {path.name.rpartition("-")[2] for path in folder.iterdir()} == {"Q8_0.gguf", "F16.gguf"}
    results = json.loads(report.read_text())["results"]
    assert {"as given", "Q8_0", "F16"} <= set(results)
    assert all(len(one["whole_s"]["2"]) == 1 for one in results.values())
    assert any(name.endswith("kv_unified: true") for name in results)
    assert "models:" in said


def test_what_is_no_model_makes_no_file(tmp_path: Path) -> None:
    source = tmp_path / "no.gguf"
    source.write_text("not a model")
    with pytest.raises(BenchmarkError, match=r"cannot make Q8_0 of no\.gguf"):
        quality.quantised_file(source, "Q8_0", tmp_path / "made", 1)
    assert not list((tmp_path / "made").iterdir())
