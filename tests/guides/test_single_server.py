"""The guide of a single server, from its first command to its last, on a Debian 13 that systemd boots.

The machine is a container of systemd-nspawn, whose files are made by debootstrap once (`build/guides`). The
commands up to the installation need the network. Those behind it change the firewall, so their machine has
a network of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.documents.blocks import ROOT, blocks

PAGE = ROOT / "docs/single-server.md"
MACHINE = ROOT / "build/guides/debian"
TIMEOUT_S = 1200
MODEL = "/opt/corral/serve_app/builtin_model/corral-demo-q8_0.gguf"
READERS = {
    "https://corral.example/source": "/guide/source.git",
    "Qwen/Qwen3-4B-GGUF:Q4_K_M --slots 10 --context 4096": f"{MODEL} --slots 10 --context 1024",
    "YOUR-NAME": "localhost",
    "llm.example/v1": "localhost/v1",
}
"""What a reader replaces, and the model that needs no download."""
KEY = """
sudo cp /var/lib/caddy/.local/share/caddy/pki/authorities/local/root.crt /guide/root.crt
sudo chmod 644 /guide/root.crt
export CURL_CA_BUNDLE=/guide/root.crt KEY=$(sudo grep -oP 'ana, key: \\K[^,]+' /etc/corral/keys.yaml)
"""
"""Before the colleague asks: the key, and the authority that signs for localhost."""
UNIT = """
[Unit]
SuccessAction=poweroff
FailureAction=poweroff
[Service]
Type=oneshot
User=ana
WorkingDirectory=/home/ana
ExecStart=/bin/bash -euxo pipefail /guide/booted.sh
StandardOutput=file:/guide/booted.log
StandardError=file:/guide/booted.err
[Install]
WantedBy=multi-user.target
"""
NEEDS = ("debootstrap", "systemd-nspawn")

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, NEEDS)),
        reason="needs root, debootstrap and systemd-nspawn (Debian's systemd-container)",
    ),
]


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]


@pytest.fixture
def machine() -> Iterator[Path]:
    """The files of a new machine, with a user who may use sudo, and this checkout as a repository."""
    if not MACHINE.exists():
        partial = MACHINE.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        packages = "ca-certificates,sudo,systemd,systemd-sysv,dbus"
        run("debootstrap", "--variant=minbase", f"--include={packages}", "trixie", partial)
        partial.rename(MACHINE)
    run_folder = MACHINE.with_name("run")
    shutil.rmtree(run_folder, ignore_errors=True)
    root, upper, work = (run_folder / name for name in ("root", "upper", "work"))
    for folder in (root, upper, work):
        folder.mkdir(parents=True)
    layers = f"lowerdir={MACHINE},upperdir={upper},workdir={work}"
    run("mount", "-t", "overlay", "overlay", "-o", layers, root)
    try:
        run("chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", "ana")
        (root / "etc/sudoers.d/ana").write_text("ana ALL=(ALL) NOPASSWD: ALL\n")
        authorities = Path("/etc/ssl/certs/ca-certificates.crt")
        shutil.copy(authorities, root / authorities.relative_to("/"))
        (root / "etc/pip.conf").write_text(f"[global]\ncert = {authorities}\n")
        (root / "guide").mkdir()
        (root / "guide").chmod(0o777)
        run("git", "clone", "-q", "--bare", ROOT, root / "guide/source.git")
        for wheel in built_before():
            shutil.copy(wheel, root / "guide")
        yield root
    finally:
        run("umount", root)


def test_every_command_works(machine: Path) -> None:
    first, *others = [block.text for block in blocks(PAGE) if block.language == "sh"]
    assert "make -C /opt/corral install" in first
    others = [KEY + text if "$KEY" in text else text for text in others]
    before = "sudo apt-get update -q\n"
    behind = "sudo apt-get install --yes --download-only caddy ufw\n"
    (machine / "guide/installed.sh").write_text(as_typed(before + first + behind))
    (machine / "guide/booted.sh").write_text(as_typed("\n".join(others)))
    nspawn = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "-D", machine)
    run(*nspawn, "--user=ana", "/bin/bash", "-euxo", "pipefail", "/guide/installed.sh")
    unit = machine / "etc/systemd/system/guide.service"
    unit.write_text(UNIT)
    wants = machine / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "guide.service").symlink_to("/etc/systemd/system/guide.service")
    run(*nspawn, "--private-network", "--boot", "--console=pipe")
    printed = (machine / "guide/booted.log").read_text()
    traced = (machine / "guide/booted.err").read_text()
    commands = [line for line in traced.splitlines() if line.startswith("+ ")]
    assert commands[-1] == "+ sudo systemctl restart corral", traced[-20_000:]
    (begin,) = (found.start() for found in re.finditer(r'\{"id": ?"chatcmpl', printed))
    answer, _ = json.JSONDecoder().raw_decode(printed, begin)
    assert answer["choices"][0]["message"]["content"].strip(), printed
    assert "Firewall is active" in printed
    assert "Active: active (running)" in printed
    keys = yaml.safe_load((machine / "etc/corral/keys.yaml").read_text())["keys"]
    assert [key["name"] for key in keys] == ["operations", "ana"]


def built_before() -> list[Path]:
    """The wheel of llama.cpp, where this machine has compiled it: otherwise the guide does, for minutes."""
    caches = Path("~/.cache/corral").expanduser()
    return sorted(caches.glob("pip-*/wheels/**/llama_cpp_python-*.whl"))[:1]


def as_typed(text: str) -> str:
    if built_before():
        install = "make -C /opt/corral install"
        text = text.replace(install, f"{install} WHEELS=/guide")
    for theirs, ours in READERS.items():
        text = text.replace(theirs, ours)
    return text
