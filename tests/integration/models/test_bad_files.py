"""Files of models that are cut, missing, or misnamed: a check says so, and a start leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtests.engine.bare_loop import BareModel
from serve_app.app import application, build
from serve_app.base.errors import ConfigError, EngineUnavailableError
from serve_app.config.schema import parse
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model
from serve_app.run.resolving import check_files, resolve
from serve_app.server.model_registry import ModelFile
from serve_app.server.workers.pool import WorkerPool
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.ingress import work
from tests.integration.store.sharded import split

pytestmark = pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")


def cut(folder: Path) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(BUILTIN_MODEL.read_bytes()[:-1000])
    return path


def missing(folder: Path) -> Path:
    return folder / "missing.gguf"


def without_a_shard(folder: Path) -> Path:
    first, second = split(BUILTIN_MODEL, folder / "shards", 2)
    second.unlink()
    return first


def with_names_of_ones_own(folder: Path) -> Path:
    first, second = split(BUILTIN_MODEL, folder / "shards", 2)
    second.rename(folder / "model.part2.gguf")
    return first.rename(folder / "model.gguf")


BAD: dict[Callable[[Path], Path], str] = {
    cut: "not within the file bounds",
    missing: "there is no file",
    without_a_shard: "shards-00002-of-00002.gguf",
    with_names_of_ones_own: "split",
}


def entry(name: str, source: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "source": source, "engine": {"n_slots": 1, "n_ctx_slot": 256}}


GOOD = entry("good", {"builtin": True})


@pytest.fixture(params=BAD, ids=lambda make: make.__name__)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """The entry of a model with a bad file, and a part of the reason."""
    return entry("bad", {"path": str(request.param(tmp_path))}), BAD[request.param]


def test_a_check_names_the_file(bad: tuple[dict[str, Any], str]) -> None:
    model, reason = bad
    (found,) = check_files(parse({"models": [GOOD, model]})).items()
    assert found[0] == "bad"
    assert reason in found[1]


def test_whole_files_pass(tmp_path: Path) -> None:
    first, *_ = split(BUILTIN_MODEL, tmp_path / "shards", 2)
    assert check_files(parse({"models": [GOOD, entry("sharded", {"path": str(first)})]})) == {}


@pytest.mark.parametrize("key", ["projector", "draft", "adapter"])
def test_a_check_opens_what_belongs_to_a_model(key: str, tmp_path: Path) -> None:
    source = {"path": str(tmp_path / "missing.gguf")}
    more: dict[str, Any] = {
        "projector": {"projector": source},
        "draft": {"engine": GOOD["engine"] | {"draft": {"source": source}}},
        "adapter": {"adapters": [{"id": "a", "source": source}]},
    }[key]
    problems = check_files(parse({"models": [GOOD | more]}))
    assert "missing.gguf" in problems["good"]


@pytest.mark.parametrize("only_here", [False, True])
def test_a_start_leaves_the_model_out(bad: tuple[dict[str, Any], str], only_here: bool) -> None:
    model, reason = bad
    if not only_here:
        del model["engine"]  # its size is to be looked up
    app, left_out = parse({"models": [model, GOOD]}), dict[str, str]()
    resolved = resolve(app, left_out=left_out, only_here=only_here)
    assert [one.id for one in resolved] == ["good"]
    assert reason in left_out["bad"]
    with pytest.raises(ConfigError, match=r"models \(bad\)"):
        resolve(parse({"models": [model]}), left_out={}, only_here=only_here)


def test_another_machine_may_have_the_file(tmp_path: Path) -> None:
    left_out: dict[str, str] = {}
    app = parse({"models": [entry("far", {"path": str(missing(tmp_path))})]})
    assert [one.id for one in resolve(app, left_out=left_out)] == ["far"]
    assert not left_out


def test_one_machine_has_no_other_one(tmp_path: Path) -> None:
    models = [entry("bad", {"path": str(missing(tmp_path))}), GOOD]
    bound: Any = application({"models": models}, tmp_path / "serve_config.yaml")
    assert [model.id for model in bound._bound_deployment.init_args[0]] == ["good"]


def test_an_application_on_ray_leaves_the_model_out(tmp_path: Path) -> None:
    bound: Any = build({"models": [entry("bad", {"path": str(cut(tmp_path))}), GOOD]})
    models, engines, settings, _ = bound._bound_deployment.init_args
    assert [model.id for model in models] == ["good"]
    assert len(engines) == 1
    (file,) = settings.left_out
    assert (file.id, BAD[cut] in file.problem) == ("bad", True)


async def test_workers_that_start_again_leave_the_model_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BUILTIN_MODEL.read_bytes())
    files = [ModelFile("bad", 256, str(path)), ModelFile("good", 256, str(BUILTIN_MODEL))]
    path.unlink()
    pool = WorkerPool(files, [work.__name__])
    try:
        assert await pool.run("a", work.tokens_of, b"good") > 0
        with pytest.raises(EngineUnavailableError, match="The model bad is left out"):
            await pool.run("a", work.tokens_of, b"bad")
    finally:
        await pool.close()


def test_the_reason_is_known_behind_a_model_that_was_measured_without_an_engine(
    tmp_path: Path,
) -> None:
    """`BareModel` silences llama.cpp, for the whole process, as long as it is open."""
    library.init()
    with BareModel(BUILTIN_MODEL, vocab_only=True):
        pass
    with pytest.raises(ConfigError, match="not within the file bounds"):
        Model(cut(tmp_path))
