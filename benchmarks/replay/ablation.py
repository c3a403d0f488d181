"""ProMoE's techniques one after another (ProMoE, 5.2 and figures 13 and 14): decode and prompts.

    python benchmarks/replay/ablation.py bench-data/olmoe-8 olmoe-1b-7b.npz
    python benchmarks/replay/ablation.py ... --simulated 40       # by the simulator alone

    base          experts are computed by id; a missing one is requested when its turn comes
    + prefetch    a predictor's experts are prefetched whole: a demand waits for all of one
    + chunks      a transfer is cut, and a demand waits for one chunk of it at most
    + preemption  all misses of a step are requested as soon as its gate has chosen
    + reordering  resident experts are computed first, then the others in the order of arrival

The last variant is Greenroom's default, the others have `--expert-order access` or `id`: a prompt's
misses then evict what the same step still needs, as in ProMoE's base. Cells, sessions and pairs
are those of speed.py and prefill.py.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from compare import simulated
from prefill import resident_prompt_s, with_prompt
from rig import Rig, arguments
from speed import REACTIVE, Session, misses, ratio_of, run, sessions

from common import commit, machine, note, show_ratio, table  # isort: skip
from ram_store import RamStore  # isort: skip
from greenroom.core.options.rules.expert_order import InOrder
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.hf.attach import drivers
from greenroom.runtime.store.disk import CHUNK_BYTES

UNCUT = 1 << 30  # bytes: no expert is cut


@dataclass(frozen=True)
class Variant:
    name: str
    prefetch: bool
    chunk_bytes: int
    early: bool
    reorder: bool


VARIANTS = (
    Variant("base", False, UNCUT, False, False),
    Variant("+ prefetch", True, UNCUT, False, False),
    Variant("+ chunks", True, CHUNK_BYTES, False, False),
    Variant("+ preemption", True, CHUNK_BYTES, True, False),
    Variant("+ reordering", True, CHUNK_BYTES, True, True),
)


@contextmanager
def ablated(rig: Rig, stores: dict[int, RamStore], variant: Variant) -> Iterator[None]:
    """Context in which attached caches use the scheduler of a variant."""

    def make_scheduler(
        pieces: Any, capacity: int, policy: Any, config: Any = None, costs: None = None,
        expert_bytes: int = 0, top_k: int = 0, **settings: Any,
    ) -> Scheduler:  # fmt: skip
        options = [] if variant.reorder else [InOrder(on_access=not variant.early)]
        return Scheduler(pieces, capacity, policy, options=options, **settings)

    usual, rig.ram = rig.ram, stores[variant.chunk_bytes]
    try:
        with (
            patch.object(drivers, "build_scheduler", make_scheduler),
            patch("compare.Scheduler", make_scheduler),
        ):
            yield
    finally:
        rig.ram = usual


class Recut:
    """A store in memory that reads experts in chunks of another size."""

    def __init__(self, store: RamStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def chunks(self, expert_id: int) -> Any:
        """Return an expert's chunks: one for each extent."""
        extents = {id(c.extent): c.extent for c in self._store.chunks(expert_id)}
        return tuple(
            self._store.chunks(expert_id)[0]._replace(extent=e, start=0, length=e.length)
            for e in extents.values()
        )


def prompts(chosen: list[Session]) -> list[Session]:
    return [with_prompt(session) for session in chosen]


def compare_all(
    rig: Rig, stores: dict[int, Any], chosen: list[Session], capacity: int, bandwidth: float,
    args: Any, costs: Any = None,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Run, or with `costs` simulate, every variant for one session after another."""
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for repeat, session in enumerate(chosen):
        turn = repeat % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            predictor = args.predictor if variant.prefetch else REACTIVE
            with ablated(rig, stores, variant):
                if costs is None:
                    record = run(rig, session, capacity, bandwidth, args, predictor)
                else:
                    seconds, stall, missed = simulated(
                        rig, session, capacity, costs, args.policy, predictor
                    )
                    record = {"seconds": [seconds], "stall_s": stall, "misses": missed}
            records[variant.name].append(record)
            note(f"{variant.name}: {statistics.fmean(record['seconds']) * 1e3:.0f} ms")
    return {variant.name: records[variant.name] for variant in VARIANTS}


def rows(where: str, runs: dict[str, list[dict[str, Any]]], passes: int) -> Iterator[tuple]:
    base, before = runs[VARIANTS[0].name], None
    for name, records in runs.items():
        pairs = [(sum(a["seconds"]), sum(b["seconds"])) for a, b in zip(base, records, strict=True)]
        steps = [
            (sum(a["seconds"]), sum(b["seconds"]))
            for a, b in zip(before or records, records, strict=True)
        ]
        total = sum(sum(r["seconds"]) for r in records) / (passes * len(records))
        stall = sum(r["stall_s"] for r in records) / (passes * len(records))
        first = records is base
        yield (
            where, name, f"{total * 1e3:.0f}", f"{stall * 1e3:.0f}",
            "" if first else show_ratio(steps), "" if first else show_ratio(pairs),
        )  # fmt: skip
        before = records


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--share", type=float, default=0.25, help="of the experts resident")
    add("--ratio", type=ratio_of, default=1.0, help="transfer / compute of the full system")
    add("--predictor", default="noisy-oracle:1", help="default: %(default)s")
    add("--prompt", type=int, default=64, help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=20, help="of a request (default: %(default)s)")
    add("--settle", type=int, default=4, help="of them not counted (default: %(default)s)")
    add("--fill", type=int, default=2, help="requests before (default: %(default)s)")
    add("--repeats", type=int, default=4, help="sessions (default: %(default)s)")
    add("--simulated", type=int, default=0, metavar="N", help="simulate N sessions, run none")
    parser.set_defaults(guard=False)
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    stores = {CHUNK_BYTES: rig.ram, UNCUT: Recut(rig.ram)}
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    capacity = int(rig.catalog.experts * args.share)
    repeats = args.simulated or args.repeats
    decode = sessions(rig.trace, args.tokens, args.fill, args.settle, repeats)
    prompt = prompts(sessions(rig.trace, args.prompt, 1, 0, repeats))
    resident = rig.resident()
    prompt_s = resident_prompt_s(rig, prompt[:4])
    shown: list[tuple] = []
    for where, chosen, computing in (("decode", decode, resident[0]), ("prompt", prompt, prompt_s)):
        passes = len(chosen[0].counted)
        missed = sum(misses(session, capacity, args.policy) for session in chosen)
        carried = missed * rig.expert_bytes / (passes * len(chosen))
        bandwidth = carried / (args.ratio * computing)
        note(f"{where}: {computing * 1e3:.0f} ms computing, {bandwidth / 1e9:.2f} GB/s")
        costs = None
        if args.simulated:
            if where == "prompt":
                resident = (prompt_s, prompt_s * 0.9, prompt_s * 0.9 / rig.catalog.experts)
            costs = rig.costs(bandwidth, *resident)
        runs = compare_all(rig, stores, chosen, capacity, bandwidth, args, costs)
        if args.out:
            with args.out.open("a") as file:
                for name, records in runs.items():
                    for r in records:
                        record = {"regime": where, "variant": name, **r}
                        file.write(json.dumps(record) + "\n")
        shown += rows(where, runs, passes)
    header = ("regime", "variant", "ms a pass", "stall ms", "x the one before", "x base")
    print(table(header, shown))


if __name__ == "__main__":
    main()
