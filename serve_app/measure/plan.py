"""What nodes would serve together that compute one model in stages, before they are there.

    corral capacity plan MODEL.gguf --nodes 3,4 --memory 64 --network 1,10

The times of some layers and of the output are measured on this machine, which the nodes are taken to be
like, and kept in FILE. A FILE of a smaller model with such weights will do, too: times are to each other as
bytes. This machine needs no memory for the whole model. There are as many chains as nodes are enough for,
which are as long as nodes are left; with --one-chain, all nodes are one. Layers are divided as a first
start does it. All else is simulated: engines, passes through all stages, and the network between them.

Tokens/s are those of all slots, and of a single user. Users are those who ask as --prompt-tokens,
--max-tokens and --think say, and get what --slo says. A Markdown table goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgspec

from serve_app.config.sizing import KV_SHARE_OF_MEMORY, MIN_DEFAULT_CTX, PROCESS_BYTES
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.measure import benchmark
from serve_app.measure.benchmark import HelpFormatter, bounded, listed, percentile
from serve_app.measure.capacity import most_users, parse_slo
from serve_app.measure.pipeline import MeasuredLayers, Pipeline, PipelineLoad
from serve_app.openvino.parts import ModelPart, ModelShape, StageNode, divided, fewest_stages

_MEASURED_BYTES = 2**30
"""Bytes of the layers that are measured, at most: far more than processors have caches for."""
_MOST_USERS = 1024
_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Planned:
    """What nodes with this network serve."""

    nodes: int
    network_gbit: float
    chains: int
    stages: int
    layers: tuple[int, ...]
    """The number of each stage's layers."""
    weights_gib: float
    """Weights of the largest stage."""
    slots: int
    """Requests at once in all chains."""
    context: int
    """Tokens of each request."""
    tokens_per_s: float
    user_tokens_per_s: float
    first_token_s: float
    """Seconds to a single user's first token."""
    users: int


@dataclass(frozen=True, slots=True)
class PlanLoad:
    n_slots: int
    prompt_tokens: int
    answer_tokens: int
    think_s: float
    bounds: Mapping[str, float]
    n_ctx_train: int


def planned(
    shape: ModelShape,
    times: MeasuredLayers,
    load: PlanLoad,
    *,
    nodes: int,
    stages: int,
    memory_bytes: float,
    network_gbit: float,
) -> Planned:
    """What so many nodes serve in chains of so many stages. Raises ConfigError if memory has no room."""
    node = StageNode(memory_bytes=memory_bytes - PROCESS_BYTES)
    read, n_engines = shape.read_bytes(load.n_slots), stages
    least = min(MIN_DEFAULT_CTX, load.n_ctx_train) * load.n_slots * n_engines
    parts = divided(shape, [node] * stages, read=read, n_tokens=least)
    room = min(
        KV_SHARE_OF_MEMORY
        * (node.memory_bytes - shape.weight_bytes(part))
        / sum(shape.token_bytes[part.start : part.stop])
        for part in parts
    )
    context = min(load.n_ctx_train, int(max(least, room)) // (n_engines * load.n_slots))
    depth = load.prompt_tokens + load.answer_tokens // 2
    seconds = [times.seconds_of(shape, part, depth) for part in parts]

    def served(n_users: int, think_s: float = 0.0) -> Pipeline:
        pipeline = Pipeline(
            seconds,
            n_slots=load.n_slots,
            row_bytes=2 * shape.width,
            bytes_per_s=network_gbit * _GBIT,
        )
        pipeline.run(PipelineLoad(n_users, load.prompt_tokens, load.answer_tokens, think_s))
        return pipeline

    def holds(n_users: int) -> bool:
        pipeline = served(n_users, load.think_s)
        for name, bound in load.bounds.items():
            kind, percent, unit = name.split("_")
            times = pipeline.ttft_s if kind == "ttft" else pipeline.gaps_s
            if percentile(times, int(percent[1:])) * (1000 if unit == "ms" else 1) > bound:
                return False
        return True

    chains, alone, full = nodes // stages, served(1), served(load.n_slots * n_engines)
    return Planned(
        nodes,
        network_gbit,
        chains,
        stages,
        tuple(len(part) for part in parts),
        max(map(shape.weight_bytes, parts)) / 2**30,
        chains * load.n_slots * n_engines,
        context,
        chains * full.tokens_per_s,
        1 / percentile(alone.gaps_s, 50),
        percentile(alone.ttft_s, 50),
        chains * most_users(holds, _MOST_USERS),
    )


def measured(model: Model, shape: ModelShape, threads: int, n_slots: int) -> MeasuredLayers:
    """The times of the first layers and the output, on this machine. Raises ConfigError."""
    from serve_app.engine.backends.openvino import profile_of, small_context
    from serve_app.llama.formats import Threads

    sizes = accumulate(shape.read_bytes(math.inf, 0.0))
    n = max(1, sum(size <= _MEASURED_BYTES for size in sizes))
    options = EngineOptions(n_slots, 4096, threads, n_batch=512, backend="openvino")
    context = small_context(model, options, 4096, ModelPart(layers=range(n)))
    context.warm_up()
    profile = profile_of(context, options, Threads.alike(threads, threads))
    names = ("layer_bytes", "expert_bytes", "token_bytes")
    return MeasuredLayers(
        replace(shape, **{name: getattr(shape, name)[:n] for name in names}), profile
    )


def table(plans: Sequence[Planned]) -> str:
    """The plans as Markdown."""
    header = (
        *("nodes", "Gbit/s", "chains", "layers of each stage", "weights of a stage, GiB"),
        *(
            "requests at once",
            "tokens of each",
            "tokens/s",
            "one user, tokens/s",
            "first token, s",
            "users",
        ),
    )
    rows = [
        (
            *(plan.nodes, f"{plan.network_gbit:g}", plan.chains, " ".join(map(str, plan.layers))),
            *(f"{plan.weights_gib:.1f}", plan.slots, plan.context, f"{plan.tokens_per_s:.1f}"),
            *(f"{plan.user_tokens_per_s:.2f}", f"{plan.first_token_s:.2f}", plan.users),
        )
        for plan in plans
    ]
    return benchmark.table(header, rows)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="corral capacity plan", description=__doc__)
    parser.formatter_class = HelpFormatter
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--nodes", type=listed(bounded(1, 64)), default=(2, 3, 4), help="numbers of nodes")
    add("--memory", type=float, default=64.0, help="memory of each node, in GiB")
    add(
        "--network",
        type=listed(float),
        default=(1.0,),
        help="speeds of each node's network, in Gbit/s",
    )
    add("--one-chain", action="store_true", help="have all nodes compute one model")
    add("--slots", type=bounded(1, 64), default=8, help="requests of an engine at once")
    add("--prompt-tokens", type=bounded(1, 100_000), default=100, help="new tokens of a request")
    add("--max-tokens", type=bounded(2, 10_000), default=120, help="tokens of an answer")
    add("--think", type=float, default=60.0, help="seconds between an answer and the next request")
    add("--slo", type=parse_slo, default="ttft_p95=10s,itl_p95=500ms", help="what users should get")
    add(
        "--threads",
        type=bounded(1, 512),
        default=benchmark.usable_cores(),
        help="threads of a node",
    )
    add(
        "--times", type=Path, default=None, help="a FILE of measured times: made if it is not there"
    )
    add("--json", type=Path, default=None, help="a file for all figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure, simulate, print the table."""
    from serve_app.openvino.convert import shape_of

    args = parse_args(argv)
    try:
        model = Model(args.model, vocab_only=True)
        shape = shape_of(model.files)
        if args.times is not None and args.times.exists():
            times = msgspec.json.decode(args.times.read_bytes(), type=MeasuredLayers)
        else:
            print("Measuring layers ...", file=sys.stderr, flush=True)
            times = measured(model, shape, args.threads, args.slots)
            if args.times is not None:
                args.times.write_bytes(msgspec.json.encode(times))
        load = PlanLoad(
            *(args.slots, args.prompt_tokens, args.max_tokens, args.think, args.slo),
            model.n_ctx_train,
        )
        memory = StageNode(memory_bytes=args.memory * 2**30 - PROCESS_BYTES)
        fewest = fewest_stages(shape, memory, args.slots * min(MIN_DEFAULT_CTX, load.n_ctx_train))
        if max(args.nodes) < fewest:
            sys.exit(f"{args.model.name} needs {fewest} such nodes.")
        plans = [
            planned(
                shape,
                times,
                load,
                nodes=nodes,
                stages=nodes if args.one_chain else nodes // (nodes // fewest),
                memory_bytes=args.memory * 2**30,
                network_gbit=network,
            )
            for nodes in args.nodes
            if nodes >= fewest
            for network in args.network
        ]
    except (ConfigError, OSError, msgspec.MsgspecError) as error:
        sys.exit(str(error))
    print(table(plans))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(plan) for plan in plans], indent=1) + "\n")
