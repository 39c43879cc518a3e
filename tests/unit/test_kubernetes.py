"""What kustomize and Helm make of `cluster/kubernetes`: valid for KubeRay and Kubernetes, consistent."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.config import schema
from tests.documents.blocks import ROOT, blocks, commands
from tests.unit import kuberay
from tests.unit.kustomize import Document, render

FOLDER = Path(__file__).parents[2] / "cluster/kubernetes"
COMPONENTS = [*sorted((FOLDER / "components").iterdir()), FOLDER.parent / "monitoring"]
OPERATORS = ("PodMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator."""
FOLDERS = [FOLDER / "base", *sorted((FOLDER / "overlays").iterdir())]
every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def only(kind: str, documents: list[Document]) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def render_file(name: str) -> list[Document]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def groups(documents: list[Document]) -> list[Document]:
    cluster = only("RayService", documents)["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(documents: list[Document]) -> list[Document]:
    return [group["template"] for group in groups(documents)]


def with_component(component: Path, tmp_path: Path) -> list[Document]:
    """The base with one component."""
    for part in (FOLDER / "base", component):
        shutil.copytree(part, tmp_path / part.name)
    said = {"resources": ["../base"], "components": [f"../{component.name}"]}
    (tmp_path / "with").mkdir()
    (tmp_path / "with/kustomization.yaml").write_text(yaml.safe_dump(said))
    return render(tmp_path / "with")


@every_folder
def test_what_is_rendered_is_what_kubernetes_and_kuberay_take(folder: Path) -> None:
    for document in render(folder):
        check(document)


def check(document: Document) -> None:
    kind = document["kind"]
    if kind == "RayService":
        jsonschema.validate(document, kuberay.RAY_SERVICE)
        kuberay.check({"apiVersion": "v1", "kind": "Service"} | document["spec"]["serveService"])
        for template in pods([document]):
            kuberay.check(as_pod(template))
    elif kind not in OPERATORS:
        kuberay.check(document)


def as_pod(template: Document) -> Document:
    return {"apiVersion": "v1", "kind": "Pod"} | template


def test_the_base_needs_nothing_but_kuberay() -> None:
    documents = render(FOLDER / "base")
    assert {one["kind"] for one in documents} <= {
        *("RayService", "NetworkPolicy", "PodDisruptionBudget")
    }
    for pod in pods(documents):
        models, keys = pod["spec"]["volumes"]
        assert models == {"name": "models", "emptyDir": {}}
        assert keys["secret"]["optional"] is True
    (app,) = yaml.safe_load(only("RayService", documents)["spec"]["serveConfigV2"])["applications"]
    assert app["args"]["models"][0]["source"] == {"builtin": True}  # nothing is downloaded
    rules = only("NetworkPolicy", documents)["spec"]["ingress"]
    assert app["args"]["ingress"]["allow_anonymous"]
    assert all("from" in rule for rule in rules)


def test_the_operators_alerts_are_prometheus_own() -> None:
    folder = FOLDER.parent / "monitoring"
    rule = yaml.safe_load((folder / "prometheus-rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load((folder / "alerts.yml").read_text())


def test_kube_prometheus_stack_selects_what_is_for_the_operator() -> None:
    """By the name of its Helm release, which its chart writes into the selectors of its Prometheus."""
    for document in render(FOLDER.parent / "monitoring"):
        if document["kind"] in OPERATORS:
            assert document["metadata"]["labels"]["release"] == "kube-prometheus-stack"


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda path: path.name)
def test_each_component_fits_the_base(component: Path, tmp_path: Path) -> None:
    documents = with_component(component, tmp_path)
    assert documents != render(FOLDER / "base")
    for document in documents:
        check(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("serveConfig",), "applications: []"),
        (("rayClusterConfig", "enableAutoscaling"), True),
        (("rayClusterConfig", "autoscalerOptions", "version"), "v3"),
        (("rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "1"),
    ],
    ids=str,
)
def test_the_check_finds_what_kuberay_does_not_take(path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(only("RayService", render(FOLDER / "base")))
    at: Any = document["spec"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_the_check_finds_what_kubernetes_does_not_take() -> None:
    validator: Any = pytest.importorskip("kubernetes_validate")
    documents = [*render(FOLDER / "base"), *render_file("components/ingress/ingress.yaml")]
    wrong = copy.deepcopy(pods(documents)[0])
    wrong["spec"]["containers"][0]["livenessProbe"]["httpget"] = {}
    with pytest.raises(validator.ValidationError, match="httpget"):
        kuberay.check(as_pod(wrong))
    missing = copy.deepcopy(only("Ingress", documents))
    del missing["spec"]["rules"][0]["http"]["paths"][0]["pathType"]
    with pytest.raises(validator.ValidationError, match="pathType"):
        kuberay.check(missing)


@every_folder
def test_what_is_served_is_valid_and_fits_the_workers(folder: Path) -> None:
    documents = render(folder)
    config = yaml.safe_load(only("RayService", documents)["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    (app,) = config["applications"]
    schema.parse(app["args"])
    (model,) = app["args"]["models"]
    _, workers = groups(documents)
    (container,) = workers["template"]["spec"]["containers"]
    deployment = model["serve"]
    cpus = deployment["ray_actor_options"]["num_cpus"]
    assert container["resources"]["limits"]["cpu"] == str(cpus)
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert deployment["autoscaling_config"]["max_replicas"] <= workers["maxReplicas"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert {"n_slots", "n_ctx_slot"} <= model["engine"].keys()  # the head does not have the file
    stop_s = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert stop_s > deployment["graceful_shutdown_timeout_s"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    keys = app["args"]["ingress"].get("api_key_file", "/etc/corral/keys.yaml")
    assert str(Path(keys).parent) in mounts


@every_folder
def test_names_and_labels_lead_to_what_is_there(folder: Path) -> None:
    documents = render(folder)
    labels = [pod["metadata"]["labels"] for pod in pods(documents)]
    claims = [d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"]
    policy = only("NetworkPolicy", documents)["spec"]
    budgets = [one for one in documents if one["kind"] == "PodDisruptionBudget"]
    service = only("RayService", documents)["spec"]["serveService"]
    for pod, label in zip(pods(documents), labels, strict=True):
        volume = pod["spec"]["volumes"][0]
        assert claims == [v["claimName"] for k, v in volume.items() if k == "persistentVolumeClaim"]
        assert _selects(policy["podSelector"], label)
        assert _selects(policy["ingress"][0]["from"][0]["podSelector"], label)
    found = [
        [b["metadata"]["name"] for b in budgets if _selects(b["spec"]["selector"], one)]
        for one in labels
    ]
    assert found == [["corral-head"], ["corral-workers"]]
    (ingress,) = render_file("components/ingress/ingress.yaml")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    (monitor,) = render_file("../monitoring/pod-monitor.yaml")
    assert all(_selects(monitor["spec"]["selector"], label) for label in labels)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(documents):
        ports = {p["name"] for c in pod["spec"]["containers"] for p in c["ports"]}
        assert endpoint["port"] in ports


def _selects(selector: Document, labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector["matchLabels"]
    return wanted.items() <= labels.items()


@every_folder
def test_pods_are_unprivileged_and_only_port_8000_is_opened_with_keys(folder: Path) -> None:
    documents = render(folder)
    for pod in pods(documents):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
    rules = only("NetworkPolicy", documents)["spec"]["ingress"]
    opened = [rule["ports"] for rule in rules if "from" not in rule]
    config = yaml.safe_load(only("RayService", documents)["spec"]["serveConfigV2"])
    has_keys = "api_key_file" in config["applications"][0]["args"]["ingress"]
    assert [[port["port"] for port in ports] for ports in opened] == ([[8000]] if has_keys else [])
    for pod in pods(documents):
        assert pod["spec"]["volumes"][1]["secret"].get("optional", False) is not has_keys


@every_folder
def test_kubectl_renders_the_same(folder: Path) -> None:
    """Where there is a kubectl; no cluster is asked."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl here")
    command = [kubectl, "kustomize", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    by_name = sorted(yaml.safe_load_all(said), key=_name)
    assert by_name == sorted(render(folder), key=_name)


def _name(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


HELM = """
import json, sys
import helm_python

folder, sets, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
values |= helm_python.parse_set_string(sets) if sets else {}
with helm_python.Chart.load(folder) as chart:
    chart.validate_schema(values)
    rendered = chart.render(values, name="corral")["corral/templates/corral.yaml"]
told = [message["error"] for message in helm_python.lint(folder, values)["messages"]]
print(json.dumps([rendered, told]))
"""
"""Renders and lints a chart, in a process of its own: Go's threads and signals are not for others."""


def helm(sets: str = "", **values: Any) -> list[Document]:
    """What Helm's own code renders with these values, sorted by name. `sets` is as for `--set`."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("no helm_python here")
    done = subprocess.run(
        [sys.executable, "-c", HELM, FOLDER, sets, json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise HelmError(done.stderr)
    rendered, told = json.loads(done.stdout.splitlines()[-1])
    assert set(told) <= {"icon is recommended"}
    return sorted(yaml.safe_load_all(rendered), key=_name)


class HelmError(Exception):
    """Helm refuses the values."""


def served(documents: list[Document]) -> str:
    return str(only("RayService", documents)["spec"]["serveConfigV2"])


def by_kustomize(folder: Path) -> list[Document]:
    return sorted(render(folder), key=_name)


def test_the_chart_without_values_is_the_base() -> None:
    assert helm() == by_kustomize(FOLDER / "base")


def test_the_charts_values_make_the_small_overlay() -> None:
    overlay = by_kustomize(FOLDER / "overlays/small")
    assert overlay == helm(
        serveConfig=served(overlay),
        worker={"cpu": 4, "memory": "12Gi", "minReplicas": 1, "maxReplicas": 1},
        keysSecret="corral-keys",
        storage={"size": "100Gi", "accessMode": "ReadWriteOnce"},
    )


def test_the_page_installs_what_the_small_overlay_is() -> None:
    (command,) = (
        words
        for block in blocks(ROOT / "docs/deploy/kubernetes.md")
        for words in commands(block.text)
        if words[:2] == ["helm", "upgrade"]
    )
    sets = [value for option, value in pairwise(command) if option == "--set"]
    overlay = by_kustomize(FOLDER / "overlays/small")
    assert overlay == helm(serveConfig=served(overlay), sets=",".join(sets))


def test_the_charts_values_make_the_overlay_for_twelve_nodes() -> None:
    overlay = by_kustomize(FOLDER / "overlays/twelve-nodes")
    _, workers = groups(overlay)
    apart = workers["template"]["spec"]["affinity"]["podAntiAffinity"]
    apart["preferredDuringSchedulingIgnoredDuringExecution"] = []  # values cannot remove the base's
    assert overlay == helm(
        serveConfig=served(overlay),
        worker={
            **{"cpu": 30, "memory": "110Gi", "minReplicas": 2, "maxReplicas": 12},
            "podSpec": {"affinity": {"podAntiAffinity": apart}},
        },
        keysSecret="corral-keys",
        storage={"size": "100Gi"},
    )


@pytest.mark.parametrize(
    ("component", "values"),
    [
        ("hugging-face-token", {"huggingFaceSecret": "corral-hugging-face"}),
        ("ingress", {"ingress": {"host": "corral.example"}}),
        ("monitoring", {"monitoring": True}),
    ],
)
def test_the_charts_values_make_the_components(
    component: str, values: dict[str, Any], tmp_path: Path
) -> None:
    (folder,) = (path for path in COMPONENTS if path.name == component)
    assert helm(**values) == sorted(with_component(folder, tmp_path), key=_name)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"keysSecret": "corral-keys"}, "keysSecret and `ingress.api_key_file"),
        ({"serveConfig": "api_key_file: /etc/corral/keys.yaml"}, "keysSecret and `ingress"),
        ({"workers": {}}, "workers"),
        ({"worker": {"memory": "4 GB"}}, "memory"),
    ],
    ids=str,
)
def test_the_chart_refuses_values_that_cannot_work(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(HelmError, match=reason):
        helm(**values)


def test_the_chart_has_corrals_version() -> None:
    chart = yaml.safe_load((FOLDER / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {version("corral")}
    image = yaml.safe_load((FOLDER / "values.yaml").read_text())["image"]
    assert image == f"corral:{version('corral')}"
