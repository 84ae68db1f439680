"""One layer of experts coded by rANS, decoded into a pool, beside transformers' bf16 experts on one GPU.

    python benchmarks/expert_pool.py [--sections layer pools host launches] [--shapes qwen3-30b-a3b]
        [--seconds 0.1]

    layer     a layer without its router, for some numbers of tokens; and its decoding and products alone
    vectors   few tokens, with a pool and multiplied while they are decoded
    pools     pools of fewer slots than experts in use: what rounds cost
    host      codes in host memory: bytes that the link carries, and its speed
    launches  candidates for kernels/tuning/smNN: expert_pool.toml, and multiply in rans.toml

Times are medians of CUDA events. Calls of a case lie in one CUDA graph, one for each layer of LAYERS, whose
weights and routes differ, and cases take turns. Nothing is timed before decoded experts are the dense ones
bit for bit, and the error of a layer against fp64 is at most SCATTER times that of bf16.

A run of all but `launches` is saved as benchmarks/results/expert_pool.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_codec import captured, link_speed, stream
from packed_linear import SCATTER, distance, in_turns
from record import Environment, Measurement, save_sections, spread
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from weight_laws import generator_on, trained_like

from neuzip.kernels import tuning
from neuzip.kernels.expert_pool.lists import ExpertsInUse
from neuzip.kernels.expert_pool.ops import experts_in_use, pool_linear, tile_rows
from neuzip.kernels.experts import ops as experts_ops
from neuzip.kernels.experts import reference
from neuzip.runtime import buffers
from neuzip.runtime.weights import AnsWeight, expert_vectors
from neuzip.runtime.weights import expert_pool as pools

Tensor = torch.Tensor
Row = dict[str, Any]

SHAPES = {"qwen3-30b-a3b": (128, 2048, 768, 8), "mixtral-8x7b": (8, 4096, 14_336, 2)}
"""Experts, hidden size, inner size, and experts of a token."""

LAYERS = 3
"""Layers of a graph, so that the weights of one are not in the L2 when its turn comes again."""

FEW_TOKENS = (1, 2, 3, 4, 8)

TOKENS = (1, 8, 32, 128, 512, 2048)

LIMITS = tuple(mib << 20 for mib in (128, 256, 512, 1024, 2048, 4096))
"""Bytes of pools."""

HOST_TOKENS = (1, 8, 32)

CANDIDATES = tuple(itertools.product((32, 64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 5)))
"""Columns, depth, warps and stages of a launch."""

SHARED_MEMORY = 227 << 10

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Layer:
    """The experts of a layer, dense and coded."""

    dense: Any
    coded: tuple[AnsWeight, AnsWeight]

    @classmethod
    def of(cls, shape: str, seed: int) -> Layer:
        """Weights of a law, that decode bit for bit."""
        experts, hidden, inner, _ = SHAPES[shape]
        config = Qwen3MoeConfig(num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner)
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            dense = Qwen3MoeExperts(config)
        generator = generator_on(DEVICE, seed)
        for name, parameter in list(dense.named_parameters()):
            values = trained_like(parameter.shape[0] * parameter.shape[1], parameter.shape[2], generator)
            weight = torch.nn.Parameter(values.view(parameter.shape), requires_grad=False)
            setattr(dense, name, weight)
        coded = AnsWeight.of(dense.gate_up_proj.detach()), AnsWeight.of(dense.down_proj.detach())
        return cls(dense, coded)


@dataclass(frozen=True)
class Routes:
    """Tokens, and the experts of each."""

    x: Tensor
    index: Tensor
    weights: Tensor

    @classmethod
    def of(cls, shape: str, tokens: int, seed: int) -> Routes:
        """Random ones: every expert as often as any other."""
        experts, hidden, _, k = SHAPES[shape]
        generator = generator_on(DEVICE, 1000 + seed)
        scores = torch.rand(tokens, experts, generator=generator, device=DEVICE)
        weights, index = scores.topk(k)
        x = torch.randn(tokens, hidden, generator=generator, device=DEVICE).bfloat16()
        return cls(x, index, (weights / weights.sum(-1, keepdim=True)).bfloat16())


def main() -> None:
    """Measure, print, save."""
    sections: dict[str, Callable[..., list[Row]]] = {
        "layer": layer_rows, "vectors": vector_rows, "pools": pool_rows, "host": host_rows,
        "launches": launch_rows,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", nargs="+", choices=sections, default=["layer", "vectors", "pools", "host"]
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.1, help="of a case")
    arguments = parser.parse_args()
    rows: dict[str, list[Row]] = {name: [] for name in arguments.sections}
    with torch.cuda.stream(stream()), torch.no_grad():
        for shape in arguments.shapes:
            layers = [Layer.of(shape, seed) for seed in range(LAYERS)]
            require_right(shape, layers[0])
            for name in arguments.sections:
                rows[name] += sections[name](shape, layers, arguments.seconds)
            del layers
            torch.cuda.empty_cache()
    whole = [name for name in rows if name != "launches" and set(arguments.shapes) == set(SHAPES)]
    if not whole:
        print("not saved: this was not a run of all shapes")
        return
    here = Environment.here("neuzip-toolkit", "torch", "triton", "transformers", gpu=True, needs_commit=True)
    facts = {"seconds": arguments.seconds, "layers": LAYERS}
    path = save_sections(
        "expert_pool", __doc__.splitlines()[0], {name: Measurement(here, rows[name], facts) for name in whole}
    )
    print(f"saved {path}")


def require_right(shape: str, layer: Layer) -> None:
    """Exit unless decoded experts are the dense ones bit for bit, and a layer is as exact as bf16."""
    for weight, dense in zip(layer.coded, (layer.dense.gate_up_proj, layer.dense.down_proj), strict=True):
        routes = Routes.of(shape, 2048, 0)
        used = in_use(routes, len(dense))
        pool = pools._pool([weight])
        for first in range(0, len(dense), 8):
            memory = torch.full((8 * pool.slot_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
            (decoded,) = pool.decode(used, first, memory)
            for slot, expert in enumerate(used.chosen[first : first + 8].tolist()):
                if expert >= 0 and not torch.equal(
                    decoded[slot].view(torch.int16), dense[expert].view(torch.int16)
                ):
                    raise SystemExit(f"{shape}: expert {expert} was decoded wrong")
    for tokens, always in ((1, True), (2, True), (1, False), (64, False)):
        routes = Routes.of(shape, tokens, 0)
        exact = reference.experts(
            routes.x, routes.index, routes.weights, layer.dense.gate_up_proj, layer.dense.down_proj
        )
        with while_decoded(always):
            error = distance(pooled(layer, routes)(), exact)
        base = distance(bf16(layer, routes)(), exact)
        if not error <= SCATTER * base:
            raise SystemExit(f"{shape}, {tokens} tokens: the error is {error:.2e}, that of bf16 {base:.2e}")


def bf16(layer: Layer, routes: Routes) -> Callable[[], Tensor]:
    """The layer by transformers' kernels for Hopper."""
    forward = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return lambda: forward(layer.dense, routes.x, routes.index, routes.weights)


def pooled(layer: Layer, routes: Routes, limit: int = pools.LIMIT) -> Callable[[], Tensor]:
    """The layer with a pool."""
    return lambda: pools.pooled_experts(routes.x, routes.index, routes.weights, *layer.coded, limit=limit)


def in_use(routes: Routes, experts: int) -> ExpertsInUse:
    """Which experts routes use."""
    tile = tile_rows(routes.index.numel(), experts, DEVICE)
    return experts_in_use(experts_ops.route(routes.index, routes.x, experts, tile)[0], experts)


def cases(shape: str, layers: Sequence[Layer], tokens: int) -> list[tuple[Layer, Routes]]:
    """Every layer with routes of its own."""
    return [(layer, Routes.of(shape, tokens, seed)) for seed, layer in enumerate(layers)]


def layer_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """The whole layer and its parts, by tokens."""
    rows = []
    experts = SHAPES[shape][0]
    for tokens in TOKENS:
        each = cases(shape, layers, tokens)
        used = statistics.mean(len(routes.index.unique()) for _, routes in each)
        calls: dict[str, list[Callable[[], object]]] = {
            "bf16": [bf16(*case) for case in each],
            "ans": [pooled(*case) for case in each],
        }
        pool = pools._pool(layers[0].coded)
        if min(tokens * SHAPES[shape][3], experts) * pool.slot_bytes <= pools.LIMIT:
            alone = [parts(*case) for case in each]
            calls |= {"decoding": [a for a, _ in alone], "products": [b for _, b in alone]}
        medians = {}
        for name, mine in zip(calls, timed(list(calls.values()), seconds), strict=True):
            medians[name] = statistics.median(mine)
            rows.append(
                {"shape": shape, "tokens": tokens, "by": name, "experts_in_use": round(used, 1)}
                | spread(mine, "us")
                | {"ratio": medians["bf16"] / medians[name]}
            )
        decoded = used * pool.slot_bytes / 1e3
        print(f"{shape:16}{tokens:5} tokens {used:6.1f} experts  "
              + "  ".join(f"{name} {us:9.1f} us" for name, us in medians.items())
              + f"  ans {medians['bf16'] / medians['ans']:.3f}x"
              + (f"  decoding {decoded / medians['decoding']:.0f} GB/s" if "decoding" in medians else ""),
              flush=True)  # fmt: skip
        buffers.release()
    return rows


def parts(layer: Layer, routes: Routes) -> tuple[Callable[[], object], Callable[[], object]]:
    """Decoding alone, and both products alone, in memory of their own."""
    pool = pools._pool(layer.coded)
    used = in_use(routes, len(layer.dense.gate_up_proj))
    memory = torch.zeros(used.chosen.numel() * pool.slot_bytes, dtype=torch.uint8, device=DEVICE)
    one, other = pool.decode(used, 0, memory)
    rows = torch.zeros(used.routing.tiles.shape[0] * used.routing.tile, one.shape[2], device=DEVICE)
    rows, inner = rows.bfloat16(), rows.bfloat16().new_zeros(len(rows), other.shape[2])

    def products() -> None:
        pool_linear(rows, one, used)
        pool_linear(inner, other, used)

    return lambda: pool.items.decode(used.chosen, 0, memory), products


def timed(calls: Sequence[Sequence[Callable[[], object]]], seconds: float) -> list[list[float]]:
    """Microseconds of a call of each kind, in graphs that take turns."""
    runs = [captured(each) for each in calls]
    return in_turns(runs, [len(each) for each in calls], None, seconds)


def while_decoded(always: bool) -> AbstractContextManager[None]:
    """Within which experts are always, or never, multiplied while they are decoded."""
    return tuning.replaced({"expert_pool.while_decoded": [{"use": {"pays": always}}]})


def vector_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """Few tokens in both ways."""
    rows = []
    for tokens in FEW_TOKENS:
        each = cases(shape, layers, tokens)
        runs = [captured([bf16(*case) for case in each])]
        for always in (False, True):
            with while_decoded(always):
                runs.append(captured([pooled(*case) for case in each]))
        times = in_turns(runs, [len(each)] * 3, None, seconds)
        dense, pool, vectors = (statistics.median(mine) for mine in times)
        for name, mine in zip(("bf16", "pool", "vectors"), times, strict=True):
            rows.append({"shape": shape, "tokens": tokens, "by": name} | spread(mine, "us"))
        print(f"{shape:16}{tokens:5} tokens  bf16 {dense:9.1f} us, pool {pool:9.1f} us {dense / pool:.3f}x, "
              f"vectors {vectors:9.1f} us {dense / vectors:.3f}x", flush=True)  # fmt: skip
        buffers.release()
    return rows


def pool_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """Pools of several sizes, where experts in use do not all fit."""
    rows = []
    largest = pools._pool(layers[0].coded[:1]).slot_bytes
    limits = [limit for limit in LIMITS if limit >= largest]
    for tokens in (32, 2048):
        each = cases(shape, layers, tokens)
        runs = [[pooled(*case, limit=limit) for case in each] for limit in limits]
        for limit, mine in zip(limits, timed(runs, seconds), strict=True):
            row = {"shape": shape, "tokens": tokens, "pool_mib": limit >> 20} | spread(mine, "us")
            rows.append(row)
            print(f"{shape:16}{tokens:5} tokens  pool {limit >> 20:5} MiB {row['us']:9.1f} us", flush=True)
        buffers.release()
    return rows


def host_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """Codes in host memory: of the first layers, as much as a GPU does not hold."""
    link = link_speed()
    moved = [Layer(one.dense, tuple(weight.offloaded() for weight in one.coded)) for one in layers]
    rows = []
    for tokens in HOST_TOKENS:
        each = cases(shape, moved, tokens)
        used = statistics.mean(len(routes.index.unique()) for _, routes in each)
        (mine,) = timed([[pooled(*case) for case in each]], seconds)
        median = statistics.median(mine)
        share = used / SHAPES[shape][0]
        nbytes = share * sum(weight.host_bytes for weight in moved[0].coded)
        dense = share * sum(weight.nbytes for weight in moved[0].dense.parameters())
        bf16_us = dense / link / 1e3
        rows.append(
            {"shape": shape, "tokens": tokens, "experts_in_use": round(used, 1), "link_mb": nbytes / 1e6,
             "bf16_mb": dense / 1e6, "copy_gb_s": link, "read_gb_s": nbytes / median / 1e3,
             "bf16_copy_us": bf16_us, "ratio": bf16_us / median} | spread(mine, "us")
        )  # fmt: skip
        print(
            f"{shape:16}{tokens:5} tokens  host {median:9.1f} us, {nbytes / 1e6:7.1f} MB over the link at "
            f"{nbytes / median / 1e3:.1f} GB/s; bf16 {dense / 1e6:7.1f} MB, {bf16_us:9.1f} us at "
            f"{link:.1f} GB/s: {bf16_us / median:.2f}x",
            flush=True,
        )
        buffers.release()
    return rows


def launch_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """Candidates of the products' launch, by tokens: the best are printed, and what the table has."""
    rows = multiply_rows(shape, layers, seconds)
    for tokens in TOKENS:
        each = [
            (layer, routes, in_use(routes, SHAPES[shape][0]))
            for layer, routes in cases(shape, layers, tokens)
        ]
        tile = each[0][2].routing.tile
        for number, name in enumerate(("gate and up", "down")):
            times = {}
            for launch in [None, *candidates(tile)]:
                with using(launch):
                    mine = timed([[product(*case, number) for case in each]], seconds / 4)[0]
                times[launch] = statistics.median(mine)
            ranked = sorted(times, key=lambda launch: times[launch])
            best = ", ".join(f"{launch} {times[launch]:.1f}" for launch in ranked[:4])
            print(
                f"{shape:16}{tokens:5} tokens, tile {tile:3}, {name:11}: table {times[None]:.1f} us, {best}",
                flush=True,
            )
            rows.append({"shape": shape, "tokens": tokens, "by": name, "us": times[None]})
    return rows


def multiply_rows(shape: str, layers: Sequence[Layer], seconds: float) -> list[Row]:
    """Candidates of products of one token: warps and registers."""
    each, times = cases(shape, layers, 1), {}
    weights = [weight for layer in layers for weight in layer.coded]
    rows = []
    for warps, registers in itertools.product((4, 8), (48, 56, 64)):
        use = {"num_warps": warps, "registers": registers}
        with while_decoded(True), tuning.replaced({"rans.multiply": [{"use": use}]}):
            for weight in weights:
                weight.__dict__.pop(expert_vectors._TABLES, None)
            mine = timed([[pooled(*case) for case in each]], seconds)[0]
        name = f"{warps} warps, {registers} registers"
        times[name] = statistics.median(mine)
        rows.append({"shape": shape, "tokens": 1, "by": name} | spread(mine, "us"))
    for weight in weights:
        weight.__dict__.pop(expert_vectors._TABLES, None)
    best = "; ".join(f"{name} {times[name]:.1f} us" for name in sorted(times, key=lambda name: times[name]))
    print(f"{shape:16}    1 token: {best}", flush=True)
    return rows


def product(layer: Layer, routes: Routes, used: ExpertsInUse, number: int) -> Callable[[], object]:
    """One product of a layer with a pool that has all experts as they are."""
    weights = (layer.dense.gate_up_proj, layer.dense.down_proj)[number]
    index = used.routing.tiles[:, 0].contiguous()
    all_of = ExpertsInUse(used.routing, used.chosen, index)
    rows = torch.zeros(len(index) * used.routing.tile, weights.shape[2], dtype=weights.dtype, device=DEVICE)
    return partial(pool_linear, rows, weights.detach(), all_of)


def candidates(tile: int) -> Iterator[tuple[int, int, int, int]]:
    """Launches whose stages fit into shared memory, and whose sums fit into registers."""
    for columns, depth, warps, stages in CANDIDATES:
        shared = 2 * stages * depth * (min(tile, 128) + columns)
        if shared <= SHARED_MEMORY - 8192 and tile * columns <= 128 * 32 * warps:
            yield columns, depth, warps, stages


def using(launch: tuple[int, int, int, int] | None) -> Any:
    """Within which products are launched so; None: as the table says."""
    if launch is None:
        return tuning.replaced({})
    columns, depth, warps, stages = launch
    use = {"columns": columns, "depth": depth, "warps": warps, "stages": stages}
    return tuning.replaced({"expert_pool.linear": [{"use": use}]})


if __name__ == "__main__":
    main()
