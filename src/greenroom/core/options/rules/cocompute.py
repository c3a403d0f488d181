"""Co-compute: the host's processor computes some missing experts from host memory.

The misses of a step are divided between their devices and the host (see `rules.processors`), by
what is queued for each link and processor and by their rates (see `rules.rates`). An expert that
the host computes gets no slot on a device and is not moved. The host computes it from its slot in
host memory, into which it is read from disk if it is not there yet. The experts that the host
computed for a token are promoted: they are fetched to their devices while the link is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.cost import Costs
from greenroom.core.events import HOST, Routed
from greenroom.core.options.rules.processors import Miss, Queues, assign, count_on_host
from greenroom.core.options.rules.promotion import PromotionQueue
from greenroom.core.options.rules.rates import Rates
from greenroom.core.plan import EXACT, ComputedGroup, Option, PromotionCandidate, StepPlan, View


class CoCompute(Option):
    """A scheduler option that chooses device or host for each missing expert.

    The choice uses the measured rates of links and processors.
    """

    uses_host = True

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._promotions = PromotionQueue()

    def plan(self, event: Routed, plan: StepPlan | None, view: View) -> StepPlan | None:
        if event.device_only:
            return plan
        misses, queues = self._misses(event, plan, view)
        if not misses:
            return plan
        rows = assign(misses, queues)
        if not rows:
            self.rates.host_unused()
            return plan
        plan = plan or StepPlan.of(event, view.pieces)
        plan.place[rows] = HOST
        for row in rows:
            self._promotions.remove(int(event.experts[row]))
        return plan

    def share(self, misses: Sequence[int], hits: int, view: View) -> int:
        rates, nbytes, queues = self.rates, int(view.pieces.nbytes[misses[0]]), Queues.empty()
        miss = rates.miss(0, 1, nbytes, True, 0, in_order=True)
        for _ in range(hits):
            queues.devices[0] += miss.on_device
        self._add_backlog(queues, (), view, in_order=True)
        count = count_on_host(len(misses), miss, queues)
        if count == len(misses) and rates.tries_copies:
            count -= 1
        if not count:
            rates.host_unused()
        elif count == len(misses):
            rates.copies_unused()
        for expert in misses[len(misses) - count :]:
            self._promotions.remove(expert)
        return count

    def _misses(
        self, event: Routed, plan: StepPlan | None, view: View
    ) -> tuple[list[Miss], Queues]:
        """Describe the misses of a step, and the queues of links and processors before them."""
        tokens = [1] * event.experts.size if event.rows is None else event.rows.tolist()
        resident, experts = view.resident(event.experts).tolist(), event.experts.tolist()
        devices = view.pieces.home_device[event.experts].tolist()
        by_kind: dict[tuple[int, bool, int], Miss] = {}  # tokens, in host memory, device
        misses, queues, moving = [], Queues.empty(view.pieces.devices), []
        nbytes = int(view.pieces.nbytes[experts[0]])
        for row, (expert, device) in enumerate(zip(experts, devices, strict=True)):
            if plan is not None and (plan.form[row] != EXACT or plan.weights[row] != expert):
                continue
            borrowed, flight = False, None
            if not resident[row]:
                borrowed, flight = view.borrowed(expert), view.in_flight(expert)
            if borrowed and flight is not None:
                moving.append(expert)
            on_device = resident[row] or borrowed
            kind = tokens[row], on_device or view.in_host(expert), device
            if kind not in by_kind:
                by_kind[kind] = self.rates.miss(row, tokens[row], nbytes, *kind[1:])
            if on_device:
                queues.devices[device] += by_kind[kind].on_device
            elif flight is None:
                misses.append(by_kind[kind]._replace(request=row))
        self._add_backlog(queues, moving, view)
        return misses, queues

    def _add_backlog(
        self, queues: Queues, moving: Sequence[int], view: View, in_order: bool = False
    ) -> None:
        pieces = view.pieces
        for link, piece, chunks in view.backlog(moving):
            nbytes = chunks * float(pieces.nbytes[piece] / pieces.chunks[piece])
            seconds = self.rates.link(link, nbytes, in_order and link > 0)
            if link:
                queues.links[link - 1] += seconds
            else:
                queues.store += seconds

    # ---- measurements and promotion

    def calibrated(self, costs: Costs) -> None:
        self.rates.set_costs(costs)

    def started(self, link: int, lane: int, now: float) -> None:
        self.rates.chunk_started(link, lane, now)

    def landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        self.rates.chunk_landed(link, lane, nbytes, now)

    def copied(self, nbytes: int, seconds: float) -> None:
        self.rates.copied(nbytes, seconds)

    def computed(self, group: ComputedGroup, seconds: float, view: View) -> None:
        nbytes = int(view.pieces.nbytes[group.experts[0]])
        self.rates.computed(group.device, group.tokens, nbytes, seconds)
        if group.device == HOST and not group.prefill:
            self._promotions.add(group.layer, group.experts, view.promotions())

    def candidates(self, view: View) -> Sequence[PromotionCandidate]:
        return self._promotions.latest()

    def dismiss(self, expert: int) -> None:
        self._promotions.remove(expert)
