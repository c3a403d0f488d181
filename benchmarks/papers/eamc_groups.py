"""MoE-Infinity, table 2 and figure 4: groups of requests, and what follows what.

K-means groups the EAMs of a recording's requests (its first --limit tokens); the number of groups
is at the elbow of the curve of inertia. Each layer of an EAM is divided by its sum first, since our
requests differ in length. The transition matrix has the share of a group's requests that are
followed by a request of another group, in stored order and in a drawn order; rows of groups of
fewer than 10 requests are left out of the table and of the histogram. If the next request did not
depend on the group, each group's share of all requests would be expected (`by size alone`).
"""

from __future__ import annotations

import argparse

import numpy as np
from common import BY_MODEL, MODELS, figure, limit, options, percent, recordings, save, table

from greenroom.trace.groups import LOW, group_requests, transitions

LEAST = 10  # requests of a group whose transitions are counted


def chances(matrix: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Transition probabilities from all groups of at least LEAST requests."""
    return matrix[np.bincount(of, minlength=len(matrix)) >= LEAST].ravel()


def main(args: argparse.Namespace) -> None:
    random = np.random.default_rng(args.seed)
    fig, panels = figure(2, len(args.models), 0.6 + 2.2 * len(args.models), 4.6)
    rows = []
    for n, (model, recording) in enumerate(recordings(args).items()):
        trace = recording.head(limit(args))
        groups = group_requests(trace, seed=args.seed)
        order = random.permutation(groups.of)
        shares = np.bincount(groups.of) / len(groups.of)
        orders = [
            chances(matrix, groups.of)
            for matrix in (groups.transitions, transitions(order, groups.number))
        ]
        rows.append([
            MODELS[model], trace.requests, groups.number, f"{groups.largest:.3f}",
            *(f"{each.max():.2f}, {percent(float((each < LOW).mean()))}" for each in orders),
            f"{shares.max():.2f}, {percent(float((shares < LOW).mean()))}",
        ])  # fmt: skip
        top, bottom = panels[0, n], panels[1, n]
        top.imshow(groups.transitions, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
        top.set_title(MODELS[model], fontsize=8.5)
        top.set(xlabel="next group", ylabel="group" if n == 0 else "")
        top.grid(visible=False)
        bins = np.linspace(0, 1, 21)
        bottom.hist(orders[0], bins, color=BY_MODEL[model], alpha=0.8, label="stored order")
        bottom.hist(orders[1], bins, color="#4d4d4d", histtype="step", label="drawn order")
        bottom.axvline(LOW, color="#888888", linewidth=0.8, linestyle=":")
        bottom.set_yscale("log")
        bottom.set(xlabel="probability", ylabel="transitions" if n == 0 else "")
        bottom.legend(fontsize=7)
    save(fig, args, "eamc-groups")
    table(
        args, "eamc-groups",
        ["recording", "requests", "groups", "largest group", f"highest, share below {LOW}",
         "drawn order", "by size alone"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite"])
    main(parser.parse_args())
