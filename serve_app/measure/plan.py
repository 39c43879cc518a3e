"""Plans nodes that compute one model in stages: what they would serve, before they are there.

    corral capacity plan MODEL.gguf --nodes 3,4 --memory 64 --network 1,10

The times of a slice of the model are measured on this machine, which should be like the nodes. FILE keeps
them, and serves a larger model with weights of the same format, too: times count by bytes. This machine
needs no memory for the whole model. There are as many chains as nodes are enough for. Chains get longer
while nodes are left; with --one-chain, all nodes are one chain. Layers are divided as a first start does
it. All else is simulated: engines, passes through all stages, and the network between them.

Tokens/s are those of all slots, and of a single user. Users are those who ask as --prompt-tokens,
--max-tokens and --think say, and get what --slo says. A Markdown table goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from serve_app.config.sizing import KV_SHARE_OF_MEMORY, MIN_DEFAULT_CTX, PROCESS_BYTES
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.measure import benchmark
from serve_app.measure.benchmark import HelpFormatter, bounded, listed, new_file, percentile
from serve_app.measure.capacity import most_users, parse_slo
from serve_app.measure.pipeline import MeasuredLayers, PipelineLoad, simulated
from serve_app.openvino.parts import ModelShape, StageNode, divided, fewest_stages
from serve_app.progress import nowhere

_MOST_USERS = 1024


def planned(
    shape: ModelShape,
    times: MeasuredLayers,
    load: PipelineLoad,
    bounds: Mapping[str, float],
    *,
    n_ctx_train: int,
    nodes: int,
    stages: int,
    node: StageNode,
    network_gbit: float,
) -> dict[str, Any]:
    """The figures of so many such nodes, by their names, with chains of so many stages. `bounds` are an
    SLO's, as `parse_slo` gives them, of ttft and itl only. Raises ConfigError if memory has no room."""
    chains, n_at_once = nodes // stages, load.n_slots * stages
    least = min(MIN_DEFAULT_CTX, n_ctx_train) * n_at_once
    read = shape.read_bytes(load.n_slots)
    parts = divided(shape, [node] * stages, read=read, n_tokens=least)
    room = min(
        KV_SHARE_OF_MEMORY
        * (node.memory_bytes - shape.weight_bytes(part))
        / sum(shape.token_bytes[part.start : part.stop])
        for part in parts
    )
    depth = load.prompt_tokens + load.answer_tokens // 2
    seconds = [times.seconds_of(shape, part, depth) for part in parts]
    bytes_per_s = network_gbit * 1e9 / 8
    run = partial(simulated, seconds, row_bytes=2 * shape.width, bytes_per_s=bytes_per_s)
    busy = replace(load, think_s=0.0)

    def holds(n_users: int) -> bool:
        served = run(load, n_users)
        measured_s = {"ttft": served.ttft_s, "itl": served.gaps_s}
        named = ((name.split("_"), bound) for name, bound in bounds.items())
        return all(
            percentile(measured_s[kind], int(percent[1:])) * (1000 if unit == "ms" else 1) <= bound
            for (kind, percent, unit), bound in named
        )

    alone = run(busy, 1)
    return {
        "nodes": nodes,
        "Gbit/s": network_gbit,
        "chains": chains,
        "layers of each stage": [len(part) for part in parts],
        "weights of a stage, GiB": max(map(shape.weight_bytes, parts)) / 2**30,
        "requests at once": chains * n_at_once,
        "tokens of each": min(n_ctx_train, int(max(least, room)) // n_at_once),
        "tokens/s": chains * run(busy, n_at_once).tokens_per_s,
        "one user, tokens/s": 1 / percentile(alone.gaps_s, 50),
        "first token, s": percentile(alone.ttft_s, 50),
        "users": chains * most_users(holds, _MOST_USERS),
    }


def measured(model: Model, threads: int, n_slots: int) -> MeasuredLayers:
    """The times of a slice of the model, on this machine. Raises ConfigError and OSError."""
    from serve_app.engine.backends.openvino import profile_of, small_context
    from serve_app.llama.formats import Threads
    from serve_app.openvino.convert import shape_of
    from serve_app.openvino.slices import converted_slice

    options = EngineOptions(n_slots, 4096, threads, n_batch=512, backend="openvino")
    with converted_slice(model, None, nowhere) as (path, *_):
        context = small_context(Model(path, vocab_only=True), options, 4096)
        context.warm_up()
        profile = profile_of(context, options, Threads.alike(threads, threads))
        context.close()
        return MeasuredLayers(shape_of([path]), profile)


def _cell(figure: Any) -> str:
    if isinstance(figure, list):
        return " ".join(map(str, figure))
    return f"{figure:.3g}" if isinstance(figure, float) else str(figure)


def _slo(text: str) -> dict[str, float]:
    bounds = parse_slo(text)
    if any(name.startswith("e2e") for name in bounds):
        raise argparse.ArgumentTypeError("A plan has ttft and itl only.")
    return bounds


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="corral capacity plan", description=__doc__)
    parser.formatter_class = HelpFormatter
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--nodes", type=listed(bounded(1, 64)), default=(2, 3, 4), help="numbers of nodes")
    add("--memory", type=bounded(0.0, 1e6), default=64.0, help="memory of each node, in GiB")
    network = "speeds of each node's network, in Gbit/s"
    add("--network", type=listed(bounded(0.001, 1e6)), default=(1.0,), help=network)
    add("--one-chain", action="store_true", help="have all nodes compute one model")
    at_once = "requests of an engine at once"
    add("--slots", type=bounded(1, 64), default=8, help=at_once)
    add("--prompt-tokens", type=bounded(1, 100_000), default=100, help="new tokens of a request")
    add("--max-tokens", type=bounded(2, 10_000), default=120, help="tokens of an answer")
    think = "seconds between an answer and the next request"
    add("--think", type=bounded(0.0, 1e6), default=60.0, help=think)
    add("--slo", type=_slo, default="ttft_p95=10s,itl_p95=500ms", help="what users should get")
    cores = benchmark.usable_cores()
    add("--threads", type=bounded(1, 512), default=cores, help="threads of a node")
    add("--times", type=new_file, help="a FILE of measured times: made if it is not there")
    add("--json", type=new_file, help="a file for all figures")
    return parser.parse_args(argv)


def _plans(args: argparse.Namespace) -> list[dict[str, Any]]:
    from serve_app.openvino.convert import shape_of

    model = Model(args.model, vocab_only=True)
    shape = shape_of(model.files)
    if args.times is not None and args.times.exists():
        try:
            times = msgspec.json.decode(args.times.read_bytes(), type=MeasuredLayers)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{args.times} has no measured times: {error}.") from None
    else:
        print("Measuring layers ...", file=sys.stderr, flush=True)
        times = measured(model, args.threads, args.slots)
        if args.times is not None:
            args.times.write_bytes(msgspec.json.encode(times))
    node = StageNode(memory_bytes=args.memory * 2**30 - PROCESS_BYTES)
    n_tokens = args.slots * min(MIN_DEFAULT_CTX, model.n_ctx_train)
    fewest = fewest_stages(shape, node, n_tokens)
    if max(args.nodes) < fewest:
        raise ConfigError(f"{args.model.name} needs {fewest} such nodes.")
    return [
        planned(
            shape,
            times,
            PipelineLoad(args.slots, args.prompt_tokens, args.max_tokens, args.think),
            args.slo,
            n_ctx_train=model.n_ctx_train,
            nodes=nodes,
            stages=nodes
            if args.one_chain
            else min(len(shape.layer_bytes), nodes // (nodes // fewest)),
            node=node,
            network_gbit=network,
        )
        for nodes in args.nodes
        if nodes >= fewest
        for network in args.network
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, simulate, print the table."""
    args = parse_args(argv)
    try:
        plans = _plans(args)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
    print(benchmark.table(list(plans[0]), [[*map(_cell, plan.values())] for plan in plans]))
    if args.json is not None:
        args.json.write_text(json.dumps(plans, indent=1) + "\n")


if __name__ == "__main__":
    main()
