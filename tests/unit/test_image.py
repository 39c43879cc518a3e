"""The image and its compose file: who runs it, what it may write, and that options in it are real."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from serve_app.cli.main import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "cluster/Dockerfile").read_text().replace("\\\n", "")
COMPOSE = yaml.safe_load((ROOT / "cluster/compose.yaml").read_text())["services"]["corral"]


Locked = dict[str, tuple[str, frozenset[str]]]


def locked(name: str) -> Locked:
    """Each package's version and hashes."""
    entries = re.split(r"^(?=\w)", (ROOT / name).read_text(), flags=re.M)
    return {
        found[1]: (found[2], frozenset(re.findall(r"--hash=(\S+)", entry)))
        for entry in entries
        if (found := re.match(r"([\w.-]+)==([\w.+!]+)", entry))
    }


def test_the_image_has_what_requirements_lock_has_and_no_tools() -> None:
    """`make lock` takes one from the other."""
    whole, image = locked("requirements.lock"), locked("cluster/image/requirements.lock")
    assert image.items() <= whole.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["openvino"]
    direct = {re.split(r"[^\w.-]", one)[0] for one in wanted}
    assert direct <= image.keys()
    assert all(hashes for _, hashes in image.values())
    assert {"pytest", "mypy", "ruff", "locust"} <= whole.keys() - image.keys()


def environment() -> dict[str, str]:
    """What the last stage of the image sets."""
    (found,) = re.findall(r"^ENV (.*)$", DOCKERFILE.rpartition("\nFROM ")[2], re.M)
    return dict(one.split("=", 1) for one in found.split())


def test_the_image_runs_as_nobody_special_and_tells_its_health() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["1000:1000"]
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M) == ['["corral"]']
    assert "/health" in re.findall(r"^HEALTHCHECK .*$", DOCKERFILE, re.M)[0]


def test_all_that_it_writes_is_in_a_volume_or_in_tmp() -> None:
    """So that its root may be read-only. Ray makes its token in the home folder, and only there."""
    settings = environment()
    assert settings["HOME"] == "/tmp"
    assert "RAY_AUTH_TOKEN_PATH" not in settings  # Ray would want the file to be there already
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        assert settings[name].startswith("/models/"), name
    assert COMPOSE["read_only"] is True
    assert COMPOSE["tmpfs"] == ["/tmp"]
    assert COMPOSE["volumes"] == ["models:/models"]


def test_the_compose_file_sets_what_corral_reads() -> None:
    (command,) = COMPOSE["command"]
    group: Any = typer.main.get_command(app)
    variables = {one.envvar for one in group.commands[command].params if one.envvar}
    given = {name for name in COMPOSE["environment"] if name.startswith("CORRAL_")}
    assert given
    assert given <= variables
    assert COMPOSE["cap_drop"] == ["ALL"]


def test_monitoring_beside_the_image_finds_its_files() -> None:
    folder = ROOT / "cluster"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["monitoring"]
        mounts = [one.split(":")[0] for one in service["volumes"]]
        assert all((folder / one).is_file() for one in mounts if one.startswith("./"))
    used = {one["source"] for one in compose["services"]["grafana"]["configs"]}
    assert used == compose["configs"].keys()
    (source,) = yaml.safe_load(compose["configs"]["sources"]["content"])["datasources"]
    assert source["type"] == "prometheus"
    scraped = yaml.safe_load((folder / "monitoring/prometheus.yml").read_text())
    (told,) = scraped["scrape_configs"][0]["file_sd_configs"]
    assert f"{environment()['XDG_CACHE_HOME']}/corral/prometheus/*.json" in told["files"]
    key = scraped["scrape_configs"][0]["authorization"]["credentials_file"]
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert secret == {"source": "prometheus", "target": f"/etc/prometheus/{key}"}
    assert secret["source"] in compose["secrets"]
