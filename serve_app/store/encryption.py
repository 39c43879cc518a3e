"""A folder's file system, and whether it is encrypted as far as Linux tells: dm-crypt, or fscrypt."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from serve_app.base.errors import ConfigError

_CRYPT = "CRYPT-"
"""The beginning of a dm-crypt device's UUID. Source: libdevmapper's users, cryptsetup's FAQ."""
_GET_POLICY = 0xC0096616
"""FS_IOC_GET_ENCRYPTION_POLICY_EX. Source: the kernel's documentation, filesystems/fscrypt."""
_POLICY_BYTES = 24
_IN_MEMORY = ("tmpfs", "ramfs")
# How mountinfo writes blanks.
_OCTAL = re.compile(r"\\([0-7]{3})")


def check_encrypted(option: str, folder: Path | None, root: Path = Path("/")) -> None:
    """Raise ConfigError if the folder of this option is not on an encrypted file system. A folder that is
    not there yet has the file system of its first parent that is. `root` has /proc and /sys."""
    if folder is None or _has_policy(folder) or _is_on_encrypted_device(folder, root):
        return
    raise ConfigError(
        f"data_at_rest: encrypted, and {option}: {folder} is on no file system that Linux knows to be "
        "encrypted (dm-crypt or fscrypt). If its volume is encrypted outside this machine, set "
        "data_at_rest: true."
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _has_policy(folder: Path) -> bool:
    """Whether fscrypt encrypts what is made in the folder."""
    descriptor = os.open(_existing(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(
            descriptor, _GET_POLICY, struct.pack("=Q", _POLICY_BYTES) + bytes(_POLICY_BYTES)
        )
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise
    finally:
        os.close(descriptor)
    return True


class Mount(NamedTuple):
    """The file system that is mounted where a folder lies."""

    number: str
    """The device's, as `major:minor`."""
    kind: str
    """The kind of file system, such as `ext4`."""
    source: str


def mount_of(folder: Path, root: Path = Path("/")) -> Mount | None:
    """The mount with this folder, or with its first parent that is there; None if nobody knows."""
    # By the path and not by the folder's device: a subvolume of Btrfs has a number of its own.
    where = _existing(folder).resolve()
    mounts: list[tuple[int, int, Mount]] = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        # "36 35 98:0 /root /mount options - type source more": see proc(5).
        fields, _, rest = line.partition(" - ")
        _, _, number, _, point, *_ = fields.split(" ")
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), point))
        if where.is_relative_to(mount):
            kind, source, *_ = rest.split(" ")
            mounts.append((len(mount.parts), len(mounts), Mount(number, kind, source)))
    return max(mounts)[2] if mounts else None  # the last one covers the others


def _is_on_encrypted_device(folder: Path, root: Path) -> bool:
    mount = mount_of(folder, root)
    if mount is None or mount.kind in _IN_MEMORY:
        return mount is not None
    number = mount.number
    if number.startswith("0:"):  # Btrfs, for example, has no device of its own
        with suppress(OSError):
            device = Path(mount.source).stat().st_rdev
            number = f"{os.major(device)}:{os.minor(device)}"
    return _is_encrypted(root / "sys/dev/block" / number)


def _is_encrypted(device: Path) -> bool:
    """Whether the block device, or each one that it is made of, is one of dm-crypt."""
    with suppress(OSError):
        if (device / "dm/uuid").read_text().startswith(_CRYPT):
            return True
    parts = sorted((device / "slaves").glob("*"))
    return bool(parts) and all(map(_is_encrypted, parts))
