"""What is in `cluster/`: every file parses, and sets nothing that its reader does not know."""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from ray import _raylet
from ray._private import log_monitor
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.modules.reporter import reporter_consts
from ray.serve._private import constants
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve.schema import ServeDeploySchema
from ray.util.metrics import Histogram, Metric

from serve_app.base.errors import RateLimitError, SlowRequestError
from serve_app.base.folders import cache_folder
from serve_app.base.metrics import make_with
from serve_app.cli.main import app
from serve_app.cluster.one_machine import environment_of
from serve_app.cluster.process import RayCounter, use_rays_exporter
from serve_app.config import schema
from serve_app.run.replica.reporting import ReplicaMetrics, lost_replicas

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
START = ROOT / "serve_app/cluster"
UNITS = sorted(CLUSTER.glob("systemd/*.service"))


def parsed(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def rayservice() -> dict[str, Any]:
    document: dict[str, Any] = parsed("kubernetes/base/rayservice.yaml")
    return document


def test_every_file_parses() -> None:
    files = [p for p in CLUSTER.rglob("*.y*ml") if p.is_file() and p.parent.name != "templates"]
    assert len(files) >= 8
    for file in files:
        assert all(document for document in yaml.safe_load_all(file.read_text())), file


@pytest.mark.parametrize("name", ["serve_config.yaml", "local/serve_config.yaml"])
def test_what_is_served_is_valid_for_corral_and_for_serve(name: str) -> None:
    schema.load(CLUSTER / name)
    ServeDeploySchema.model_validate(parsed(name))


def test_a_systemd_worker_has_time_to_end() -> None:
    (app,) = parsed("serve_config.yaml")["applications"]
    deployment = app["args"]["models"][0]["serve"]
    unit = (CLUSTER / "systemd/corral-worker.service").read_text()
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop is not None
    assert int(stop[1]) > deployment["graceful_shutdown_timeout_s"]


def test_workers_have_what_the_ingress_asks_for() -> None:
    """However they are started."""
    (app,) = parsed("serve_config.yaml")["applications"]
    asked = app["args"]["ingress"]["serve"]["ray_actor_options"]["resources"]
    (group,) = rayservice()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    unit = (CLUSTER / "systemd/corral-worker.service").read_text()
    (launched,) = re.findall(r"ray start --address=.* --resources='(.*)'", _launcher())
    (started,) = re.findall(r"^ExecStart=.* '--resources=(.*)'$", unit, re.M)
    (in_kubernetes,) = shlex.split(group["rayStartParams"]["resources"])
    for given in map(json.loads, (launched, started, in_kubernetes)):
        assert given.keys() == asked.keys()
        assert all(given[name] >= asked[name] for name in asked)


def test_ray_takes_its_cluster_files() -> None:
    """By Ray's own schema, which knows all of its fields."""
    launcher = prepare_config(parsed("ray-cluster.yaml"))
    for document in (launcher, parsed("local/autoscaler.yaml")):
        validate_config(document)
        with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
            validate_config(document | {"idle_timeout": 5})


def _launcher() -> str:
    return (CLUSTER / "ray-cluster.yaml").read_text()


def test_the_launcher_sends_files_that_are_there() -> None:
    mounts = parsed("ray-cluster.yaml")["file_mounts"]
    assert mounts["~/corral"] == "."
    deploy = re.search(r"serve deploy ~/corral/(\S+)", _launcher())
    assert deploy is not None
    assert (ROOT / deploy[1]).is_file()


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("haproxy.env", "RAY_SERVE_ENABLE_HA_PROXY"),
        ("one-machine.env", "RAY_SERVE_USE_GRPC_BY_DEFAULT"),
    ],
)
def test_settings_are_serves(file: str, first: str) -> None:
    """Every variable of Serve's is one that this Serve reads."""
    source = Path(constants.__file__).read_text()
    names = [name for name in environment_of(file) if name.startswith("RAY_SERVE_")]
    assert names[0] == first
    assert [name for name in names if f'"{name}"' not in source] == []


def test_settings_of_ray_are_rays() -> None:
    """Every other variable is one that Ray reads."""
    modules = (_raylet, log_monitor, reporter_consts)
    known = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    names = [name for name in environment_of("one-machine.env") if "RAY_SERVE_" not in name]
    assert len(names) > 10
    assert [name for name in names if name.encode() not in known] == []


def test_make_serve_is_the_command_that_users_have() -> None:
    make = (
        "make",
        "--no-print-directory",
        "--directory",
        ROOT,
        "--dry-run",
        "--old-file=.venv/.ready",
    )
    recipe = _run(*make, "serve").stdout
    last = recipe.splitlines()[-1].rstrip()
    assert last == "exec .venv/bin/corral serve --config serve_config.yaml"


def test_a_shell_reads_the_file_for_one_machine_as_corral_serve_does() -> None:
    """Comments and values mean the same to both."""
    source = f"set -a; . {shlex.quote(str(START / 'one-machine.env'))}; exec env"
    given = _run("sh", "-c", source).stdout.splitlines()
    settings = environment_of("one-machine.env")
    assert settings
    assert settings.items() <= dict(line.split("=", 1) for line in given if "=" in line).items()


SERVES = """
defaults
    mode http
frontend prometheus
    bind :4000
frontend http_frontend
    bind 127.0.0.1:8000
    log global
listen stats
  bind *:4001
"""


def test_haproxy_waits_for_slow_requests_and_tells_its_figures_here_only(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(SERVES)
    figures = {"CORRAL_HAPROXY": "echo", "CORRAL_HAPROXY_FIGURES": "127.0.0.1"}
    command: list[str | Path] = [START / "haproxy", "-db", "-f", config, "-dR"]
    for _ in range(2):  # it may be started again with the same file
        done = subprocess.run(command, env=os.environ | figures, capture_output=True, check=True)
        assert done.stdout.decode() == f"-dS -db -f {config} -dR\n"
    lines = [line.strip() for line in config.read_text().splitlines()]
    assert lines[lines.index("defaults") + 1].startswith("timeout http-request ")
    (rule,) = [line for line in lines if "wait-for-body" in line]
    assert lines[lines.index(rule) - 3 : lines.index(rule)] == [
        "bind 127.0.0.1:8000",
        "http-request del-header upgrade",  # uvicorn loses the bodies behind `Upgrade: h2c`
        "http-request del-header http2-settings",
    ]
    (refusal,) = [line for line in lines if line.startswith("http-error status 408")]
    told = json.loads(shlex.split(refusal)[-1])
    assert told["error"]["code"] == SlowRequestError.code
    assert [line for line in lines if "400" in line and "bind" in line] == [
        "bind 127.0.0.1:4000",
        "bind 127.0.0.1:4001",
    ]


def test_haproxy_counts_the_requests_of_each_key_where_there_are_keys(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    rules = {}
    for rate in ("", "200"):
        config.write_text(SERVES)
        environment = os.environ | {"CORRAL_HAPROXY": "echo", "CORRAL_HAPROXY_RATE": rate}
        subprocess.run([START / "haproxy", "-f", config], env=environment, check=True)
        rules[rate] = [line for line in config.read_text().splitlines() if "sc0" in line]
    assert not rules[""]
    _track, unlogged, refusal = rules["200"]
    assert all(rule.endswith("if { sc0_http_req_rate gt 200 }") for rule in (unlogged, refusal))
    (told,) = [word for word in shlex.split(refusal) if word.startswith("{" + '"error"')]
    assert json.loads(told)["error"]["code"] == RateLimitError.code


def test_serve_still_writes_what_our_haproxy_looks_for() -> None:
    for expected in (
        "\ndefaults\n",
        "\nfrontend http_frontend\n    bind ",
        "\n    bind :",
        "bind *:",
    ):
        assert expected in HAPROXY_CONFIG_TEMPLATE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:  # with a program that exists here
        text = re.sub(r"/opt/corral/\.venv/bin/\w+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    done = _run("systemd-analyze", "verify", *sorted(tmp_path.iterdir()))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_units_find_their_settings() -> None:
    given = set(re.findall(r"^#?(\w+)=", (CLUSTER / "systemd/corral.env").read_text(), re.M))
    of_clusters = [unit for unit in UNITS if unit.name != "corral.service"]
    for unit in of_clusters:
        text = unit.read_text()
        assert set(re.findall(r"\$\{(\w+)\}", text)) <= given
        assert "EnvironmentFile=/etc/corral/corral.env" in text
    assert len(of_clusters) == 3


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_may_write_where_it_writes(unit: Path) -> None:
    """Its variables name folders that systemd makes."""
    text = unit.read_text()
    (environment,) = re.findall(r"^Environment=(.*)$", text, re.M)
    set_ = dict(one.split("=", 1) for one in environment.split())
    folders = dict(re.findall(r"^(Cache|State|Runtime)Directory=(.*)$", text, re.M))
    assert Path("/var/lib", folders["State"]) == Path(set_["HOME"])
    if "Runtime" in folders:
        assert Path("/run", folders["Runtime"]) == Path(set_["XDG_RUNTIME_DIR"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", set_["XDG_CACHE_HOME"])
        assert cache_folder() == Path("/var/cache", folders["Cache"])
    for line in re.findall(r"^Exec\w+=/opt/corral/\.venv/bin/corral (.*)$", text, re.M):
        command, *words = line.split()
        options = {one for p in _commands()[command].params for one in p.opts}
        assert {word for word in words if word.startswith("-")} <= options


def test_rays_processes_end_when_a_single_server_says_so() -> None:
    assert "KillMode=mixed" in (CLUSTER / "systemd/corral.service").read_text().splitlines()


def test_units_are_confined_alike() -> None:
    """But for /tmp, where Prometheus finds Ray's nodes."""
    confined = {unit.name: _confinement(unit) for unit in UNITS}
    single = confined["corral.service"]
    assert single["ProtectSystem"] == "strict"
    for name, settings in confined.items():
        if name in ("corral-head.service", "corral-worker.service"):
            assert settings.pop("ReadWritePaths") == "/tmp"
            settings["PrivateTmp"] = "yes"
        assert settings == single, name


def _confinement(unit: Path) -> dict[str, str]:
    """The settings of systemd.exec's sandbox."""
    lines = dict(line.split("=", 1) for line in re.findall(r"^\w+=.*$", unit.read_text(), re.M))
    names = r"Protect|Private|Restrict|ReadWrite|NoNew|Capability|LockP|SystemCall"
    return {name: value for name, value in lines.items() if re.match(names, name)}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_rates_a_unit_as_confined(unit: Path) -> None:
    done = _run("systemd-analyze", "security", "--offline=true", "--threshold=37", unit)
    assert done.returncode == 0, done.stdout + done.stderr


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands
    return commands


def test_the_image_is_built_as_the_makefile_builds() -> None:
    """But for more CPUs, one kind of which has AMX; and of files that Docker gets."""
    dockerfile = (CLUSTER / "Dockerfile").read_text().replace("\\\n", "")
    makefile = (ROOT / "Makefile").read_text()
    ours = re.search(r"^ifneq \(\$\(AMX\),\)\nexport CMAKE_ARGS := (.*)$", makefile, re.M)
    (theirs,) = re.findall(r'^ENV CMAKE_ARGS="(.*)"$', dockerfile, re.M)
    assert ours
    there = ours[1].replace("$(CURDIR)/cluster/llama_cpp", "/opt")
    assert set(shlex.split(there)) < set(shlex.split(theirs))
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.M)
        for name in line.split()
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def panels() -> Iterator[dict[str, Any]]:
    """Every panel of the dashboard, with those in rows that are closed."""
    for panel in json.loads((CLUSTER / "monitoring/grafana.json").read_text())["panels"]:
        yield from (panel, *panel.get("panels", ()))


def expressions() -> Iterator[str]:
    """Every PromQL expression of the dashboard, with a value for each of Grafana's variables."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")


def test_the_dashboard_shows_what_replicas_export() -> None:
    """By name; tests/e2e/server/test_metrics.py asks a live one."""
    shown = set(re.findall(r"ray_corral_\w+", " ".join(expressions())))
    assert len(shown) > 15
    assert shown - exported() == set()


def test_only_the_row_of_ray_needs_ray() -> None:
    """What `corral serve` exports fills all other panels; tests/e2e/server/test_alerts.py asks one."""
    dashboard = json.loads((CLUSTER / "monitoring/grafana.json").read_text())
    of_ray = {panel["id"] for row in dashboard["panels"] for panel in row.get("panels", ())}
    for panel in panels():
        for target in panel.get("targets", ()):
            (name, *_) = re.findall(r"\bray_\w+", target["expr"])
            assert (panel["id"] in of_ray) == (not name.startswith("ray_corral_")), panel["title"]


def test_alerts_are_about_what_replicas_export_and_are_documented() -> None:
    document = yaml.safe_load((CLUSTER / "monitoring/alerts.yml").read_text())
    (group,) = document["groups"]
    named = set(re.findall(r"ray_corral_\w+", " ".join(rule["expr"] for rule in group["rules"])))
    assert len(named) >= 7
    assert named - exported() == set()
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    assert re.findall(r"^\| `(Corral\w+)`", page, re.M) == [
        rule["alert"] for rule in group["rules"]
    ]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")


def exported() -> set[str]:
    """The names of a replica's metrics as Prometheus sees them."""
    use_rays_exporter()
    values = [*vars(ReplicaMetrics("m")).values(), lost_replicas("m")]
    make_with(None)
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    suffixes = {RayCounter: ["_total"], Histogram: ["_bucket", "_sum", "_count"]}
    return {
        f"ray_{metric.info['name']}{suffix}"
        for metric in values
        if isinstance(metric, Metric)
        for suffix in suffixes.get(type(metric), [""])
    }


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Its own model of dashboards and panels, made from its schema, keeps all of it."""
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    ours = json.loads((CLUSTER / "monitoring/grafana.json").read_text())
    dashboard = dashboards.Dashboard.from_json(copy.deepcopy(ours))
    _assert_kept(ours, json.loads(encoder.JSONEncoder().encode(dashboard)))
    ours["panels"][1]["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 2
    dashboard = dashboards.Dashboard.from_json(copy.deepcopy(ours))
    with pytest.raises(AssertionError, match="lineWidht"):
        _assert_kept(ours, json.loads(encoder.JSONEncoder().encode(dashboard)))


def _assert_kept(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(ours, dict):
        for key, value in ours.items():
            assert key in theirs, f"{path}.{key}"
            _assert_kept(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _assert_kept(one, other, f"{path}[{i}]")
    else:
        assert ours == theirs, path


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here: Debian's package prometheus has it"
)


@needs_promtool
def test_prometheus_takes_its_configuration() -> None:
    done = _run("promtool", "check", "config", CLUSTER / "monitoring/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 rules found" in done.stdout


@needs_promtool
def test_each_alert_fires_for_its_fault_and_for_nothing_else() -> None:
    done = _run("promtool", "test", "rules", ROOT / "tests/unit/alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested() -> None:
    (group,) = parsed("monitoring/alerts.yml")["groups"]
    cases = yaml.safe_load((ROOT / "tests/unit/alerts.yml").read_text())["tests"]
    looks = [look for case in cases for look in case["alert_rule_test"]]
    for does_fire in (False, True):
        found = {look["alertname"] for look in looks if bool(look["exp_alerts"]) == does_fire}
        assert found == {rule["alert"] for rule in group["rules"]}


@needs_promtool
def test_the_dashboards_expressions_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(expressions())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = _run("promtool", "check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_panels_do_not_overlap_and_have_a_source() -> None:
    dashboard = json.loads((CLUSTER / "monitoring/grafana.json").read_text())
    all_panels = [*panels()]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    cells = [
        (x, y)
        for panel in all_panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    sources = {t["datasource"]["uid"] for panel in all_panels for t in panel.get("targets", ())}
    assert sources == {"${source}"}
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["source", "model"]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])
def test_the_header_for_amx_compiles(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None or platform.machine() != "x86_64":
        pytest.skip(f"no {compiler} for x86-64 here")
    source = tmp_path / "tiles.cpp"
    source.write_text(
        "#include <immintrin.h>\nvoid load(const char *config) { _tile_loadconfig(config); }\n"
    )
    header = str(ROOT / "cluster/llama_cpp/tiles.h")
    command = [compiler, "-mamx-tile", "-include", header, "-S", "-O2", "-o", "-", str(source)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("ldtilecfg") == 1
