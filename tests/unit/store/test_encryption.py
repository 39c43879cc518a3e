"""Which folders are taken for encrypted, on trees that look like /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.store.encryption import check_encrypted


def tree(
    root: Path,
    folder: Path,
    kind: str = "ext4",
    number: str | None = None,
    source: str = "/dev/mapper/data",
) -> Path:
    """A root whose /proc says that the folder is mounted; returns its device in /sys."""
    device = folder.stat().st_dev
    number = number or f"{os.major(device)}:{os.minor(device)}"
    (root / "proc/self").mkdir(parents=True)
    lines = [
        "22 27 0:999 / /proc rw,relatime - proc proc rw",
        f"36 35 {number} / {folder} rw,noatime shared:1 - {kind} {source} rw",
    ]
    (root / "proc/self/mountinfo").write_text("\n".join(lines))
    made = root / "sys/dev/block" / number
    made.mkdir(parents=True)
    return made


def encrypt(device: Path) -> None:
    (device / "dm").mkdir(parents=True)
    (device / "dm/uuid").write_text("CRYPT-LUKS2-0123-data\n")


def test_a_plain_device_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tree(tmp_path, folder)
    with pytest.raises(ConfigError, match=r"engine\.cache_folder: .*folder is on no file system"):
        check_encrypted("engine.cache_folder", folder, tmp_path)
    check_encrypted("engine.cache_folder", None, tmp_path)


def test_a_device_of_dm_crypt_is_taken_for_folders_to_come(tmp_path: Path) -> None:
    encrypt(tree(tmp_path, tmp_path))
    check_encrypted("engine.slot_folder", tmp_path / "not" / "there", tmp_path)


def test_volumes_count_by_their_parts(tmp_path: Path) -> None:
    """All physical volumes below LVM must be encrypted."""
    device = tree(tmp_path, tmp_path)
    first, second = device / "slaves/dm-0", device / "slaves/sda1"
    encrypt(first)
    check_encrypted("ingress.batch.folder", tmp_path, tmp_path)
    second.mkdir()
    with pytest.raises(ConfigError, match=r"ingress\.batch\.folder"):
        check_encrypted("ingress.batch.folder", tmp_path, tmp_path)


def test_the_device_of_a_subvolume_is_the_source_of_its_mount(tmp_path: Path) -> None:
    """As with Btrfs, where folders have device numbers that no device has."""
    folder = tmp_path / "sub volume"
    folder.mkdir()
    device = tree(tmp_path, tmp_path, "btrfs", "0:40", source="/dev/null")
    mountinfo = tmp_path / "proc/self/mountinfo"
    blanks = str(folder).replace(" ", "\\040")
    mountinfo.write_text(
        f"{mountinfo.read_text()}\n37 36 0:41 /sub {blanks} rw - btrfs /dev/null rw"
    )
    with pytest.raises(ConfigError, match=r"engine\.slot_folder"):
        check_encrypted("engine.slot_folder", folder, tmp_path)
    null = Path("/dev/null").stat().st_rdev
    encrypt(device.with_name(f"{os.major(null)}:{os.minor(null)}"))
    check_encrypted("engine.slot_folder", folder, tmp_path)


def test_memory_is_no_disk(tmp_path: Path) -> None:
    tree(tmp_path, tmp_path, "tmpfs")
    check_encrypted("engine.slot_folder", tmp_path, tmp_path)


def test_this_machine_is_read() -> None:
    """Memory's file systems are taken, and a plain root is not."""
    if Path("/dev/shm").is_dir():
        check_encrypted("engine.slot_folder", Path("/dev/shm/corral"))
