"""Co-compute: the host's processor computes some misses where their bytes lie.

A step's misses are shared out between their devices and the host (see `rules.processors`), by what
is queued for each link and processor and by how long things take (see `rules.rates`). What the host
computes gets no slot on a device and moves nothing: it is read in its slot of host memory, first
from the store where it is not there. What it has computed of a token is promoted to its device
while the link is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.cost import Costs
from greenroom.core.events import HOST, Routed
from greenroom.core.options.rules.processors import Miss, Queues, assign
from greenroom.core.options.rules.promotion import PromotionQueue
from greenroom.core.options.rules.rates import Rates
from greenroom.core.plan import EXACT, Candidate, Group, Option, Plan, View


class CoCompute(Option):
    """Plans the place of misses by measured rates."""

    uses_host = True

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._promotions = PromotionQueue()

    def plan(self, event: Routed, plan: Plan | None, view: View) -> Plan | None:
        if event.moved:
            return plan
        misses, queues = self._misses(event, plan, view)
        if not misses:
            return plan
        rows = assign(misses, queues)
        if not rows:
            self.rates.unused()
            return plan
        plan = plan or Plan.of(event, view.pieces)
        plan.place[rows] = HOST
        for row in rows:
            self._promotions.remove(int(event.experts[row]))
        return plan

    def _misses(self, event: Routed, plan: Plan | None, view: View) -> tuple[list[Miss], Queues]:
        """A step's misses, and what links and processors have to do before them."""
        tokens = [1] * event.experts.size if event.rows is None else event.rows.tolist()
        resident, experts = view.resident(event.experts).tolist(), event.experts.tolist()
        homes = view.pieces.home_device[event.experts].tolist()
        alike: dict[tuple[int, bool, int], Miss] = {}  # of a token's experts all are alike
        misses, queues, own = [], Queues.empty(view.pieces.devices), []
        nbytes = int(view.pieces.nbytes[experts[0]])
        for row, (expert, home) in enumerate(zip(experts, homes, strict=True)):
            if plan is not None and (plan.form[row] != EXACT or plan.weights[row] != expert):
                continue
            borrowed, flight = view.borrowed(expert), view.in_flight(expert)
            if borrowed and flight is not None:
                own.append(expert)
            there = resident[row] or borrowed
            kind = tokens[row], there or view.in_host(expert), home
            if kind not in alike:
                alike[kind] = self.rates.miss(row, tokens[row], nbytes, *kind[1:])
            if there:
                queues.devices[home] += alike[kind].there
            elif flight is None:
                misses.append(alike[kind]._replace(request=row))
        self._add_backlog(queues, own, view)
        return misses, queues

    def _add_backlog(self, queues: Queues, own: Sequence[int], view: View) -> None:
        pieces = view.pieces
        for link, piece, chunks in view.backlog(own):
            nbytes = chunks * float(pieces.nbytes[piece] / pieces.chunks[piece])
            seconds = self.rates.link(link, nbytes)
            if link:
                queues.links[link - 1] += seconds
            else:
                queues.store += seconds

    # ---- what is measured, and what is promoted

    def calibrated(self, costs: Costs) -> None:
        self.rates.known(costs)

    def started(self, link: int, lane: int, now: float) -> None:
        self.rates.starts(link, lane, now)

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        self.rates.lands(link, lane, nbytes, now)

    def computed(self, group: Group, seconds: float, view: View) -> None:
        nbytes = int(view.pieces.nbytes[group.experts[0]])
        self.rates.computed(group.device, group.tokens, nbytes, seconds)
        if group.device == HOST and not group.prefill:
            self._promotions.add(group.layer, group.experts, view.promotions())

    def candidates(self, view: View) -> Sequence[Candidate]:
        return self._promotions.latest()

    def dismiss(self, expert: int) -> None:
        self._promotions.remove(expert)
