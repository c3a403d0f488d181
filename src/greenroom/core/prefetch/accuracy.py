"""Accuracy of expert predictions, and ProMoE's GOODPRED (section 4.1).

GOODPRED_i(k) = ACCURACY_i(k) x FETCHRATE_i(k) for predictions of layer i made k layers ahead. A
prediction's top-k are as many of its likeliest experts as the layer used in the pass. ACCURACY is
the share of the used experts that were among the top-k. FETCHRATE is the share of the top-k, right
or wrong, whose prefetch was complete when the layer was routed. Experts that were resident without
a prefetch are left out of FETCHRATE, since they need none. The paper gives no sums over layers;
ours weight each GOODPRED by the experts that the layer used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import itemgetter


@dataclass(slots=True)
class PredictionCounts:
    """Counts of the predictions of one layer that were made equally many layers ahead.

    used:    experts that the layer's router chose
    right:   of these, experts among the top-k predicted ones
    absent:  of the top-k predicted ones, experts that needed a prefetch (were not resident)
    fetched: of the absent ones, experts whose prefetch was complete when the layer was routed
    """

    used: int = 0
    right: int = 0
    absent: int = 0
    fetched: int = 0

    def accuracy(self) -> float | None:
        """Return ProMoE's ACCURACY, the share of used experts that were predicted, or None."""
        return self.right / self.used if self.used else None

    def fetch_rate(self) -> float | None:
        """Return ProMoE's FETCHRATE, the share of predicted non-resident experts fetched in time.

        None if no predicted expert had to be fetched.
        """
        return self.fetched / self.absent if self.absent else None

    def goodpred(self) -> float | None:
        """Return ProMoE's GOODPRED, the product of accuracy and fetch rate.

        None if no predicted expert had to be fetched.
        """
        accuracy, rate = self.accuracy(), self.fetch_rate()
        return None if accuracy is None or rate is None else accuracy * rate

    def add(self, other: PredictionCounts) -> None:
        """Add the counts of other predictions."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Accuracy:
    """The accuracy of expert predictions, by layer and distance (layers ahead).

    It also counts how many predicted experts were prefetched in time.

    Of several predictions of one step, the latest is counted, at its distance. Counts are copied
    before they are summed, because another thread may add a layer meanwhile.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.counts: dict[tuple[int, int], PredictionCounts] = {}  # by (layer, distance)

    def of(self, layer: int, distance: int) -> PredictionCounts:
        """Return the counts of a layer's predictions that were made `distance` layers ahead."""
        key = layer, distance
        if key not in self.counts:
            self.counts[key] = PredictionCounts()
        return self.counts[key]

    def reset(self) -> None:
        """Drop all counts of expert predictions."""
        self.counts.clear()

    def by_layer(self) -> list[float | None]:
        """Return the accuracy of expert predictions for each layer; None without predictions."""
        layers = [PredictionCounts() for _ in range(self._layers)]
        for (layer, _), counts in list(self.counts.items()):
            layers[layer].add(counts)
        return [counts.accuracy() for counts in layers]

    def share(self) -> float | None:
        """Return the accuracy of expert predictions over all layers; None without predictions."""
        return self._total().accuracy()

    def fetch_rate(self) -> float | None:
        """Return the share of predicted non-resident experts that were prefetched in time.

        None if no predicted expert had to be fetched.
        """
        return self._total().fetch_rate()

    def good(self) -> float | None:
        """Return the mean GOODPRED over layers and distances, weighted by used experts.

        None if no predicted expert had to be fetched.
        """
        good = [
            (c.used, value)
            for c in list(self.counts.values())
            if (value := c.goodpred()) is not None
        ]
        used = sum(weight for weight, _ in good)
        return sum(weight * value for weight, value in good) / used if used else None

    def by_distance(self) -> list[dict[str, int | float | None]]:
        """Return ACCURACY, FETCHRATE and GOODPRED for each layer and distance, in this order."""
        return [
            {
                "layer": layer,
                "distance": distance,
                "accuracy": counts.accuracy(),
                "fetch_rate": counts.fetch_rate(),
                "goodpred": counts.goodpred(),
            }
            for (layer, distance), counts in sorted(self.counts.items(), key=itemgetter(0))
        ]

    def _total(self) -> PredictionCounts:
        total = PredictionCounts()
        for counts in list(self.counts.values()):
            total.add(counts)
        return total
