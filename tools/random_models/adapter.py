"""Writes LoRA adapters with random weights for a given model: real shapes and cost, meaningless change.

    python -m tools.random_models.adapter MODEL.gguf OUT.gguf --rank 16 --seed 1

The model may be of any architecture: every matrix of its attention and feed-forward layers gets a change
of that rank. The same model, rank and seed give the same bytes (under one version of numpy).
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

_CHANGED = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.weight")
_ALPHA = 16.0
# Of what a matrix makes of a vector, its change makes about this part: enough for other texts.
_STRENGTH = 0.3


def write_random_adapter(
    model: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    rank: int = 16,
    seed: int = 0,
    architecture: str | None = None,
    shrink: int = 0,
) -> None:
    """Write an adapter for the GGUF file `model` to `path`, whole or not at all. To try what must be
    refused, `architecture` is another one than the model's, and `shrink` leaves out so many columns.

    Raises ValueError if the model has no matrices that could be changed, OSError if a file cannot be read
    or written.
    """
    reader, target = GGUFReader(os.fspath(model)), Path(path)
    matrices = [one for one in reader.tensors if _CHANGED.fullmatch(one.name)]
    if not matrices:
        raise ValueError(f"{os.fspath(model)} has no attention or feed-forward matrices")
    field = reader.get_field("general.architecture")
    found = str(field.contents()) if field is not None else ""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    writer = GGUFWriter(part, architecture or found)
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", _ALPHA)
        for index, matrix in enumerate(matrices):
            rng = np.random.default_rng([seed, index])
            n_in, n_out = (int(n) for n in matrix.shape[:2])
            n_in -= shrink
            down = rng.standard_normal((rank, n_in), np.float32) * n_in**-0.5
            up = rng.standard_normal((n_out, rank), np.float32)
            up *= _STRENGTH * rank**0.5 / _ALPHA
            writer.add_tensor(f"{matrix.name}.lora_a", down)
            writer.add_tensor(f"{matrix.name}.lora_b", up)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a LoRA adapter with random weights.")
    parser.add_argument("model", type=Path, help="the GGUF file that it is for")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_random_adapter(args.model, args.out, rank=args.rank, seed=args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, rank {args.rank}")


if __name__ == "__main__":
    main()
