"""The methods of its options that a scheduler calls: only those that they override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from greenroom.core.plan import Option, View, overrides
from greenroom.core.scheduler.step import Step


class OptionCalls:
    """The methods of its options that a scheduler calls; others cost nothing.

    planners, observers: their methods `plan` and `computed`
    proposers:  those that propose experts to fetch
    step_class: the class of steps
    """

    def __init__(self, options: Sequence[Option]) -> None:
        self.planners = [o.plan for o in options if overrides(o, "plan")]
        self.observers = [o.computed for o in options if overrides(o, "computed")]
        self.proposers = [o for o in options if overrides(o, "candidates")]
        self.step_class = next((o.step_class for o in options if o.step_class), Step)
        self._copy_observers = [o.copied for o in options if overrides(o, "copied")]
        self._sharing = next((o for o in options if overrides(o, "share")), None)
        self._options = options

    @property
    def decide_steps(self) -> bool:
        """Tell whether options decide about every step, other than by `Option.share`."""
        others = [option for option in self._options if option is not self._sharing]
        methods = "plan", "computed", "candidates"
        return self.step_class is not Step or any(
            overrides(option, method) for option in others for method in methods
        )

    def share(self, view: View) -> Callable[[Sequence[int], int], int] | None:
        """Return the method `share` of an option that has one, for a scheduler's view."""
        return None if self._sharing is None else partial(self._sharing.share, view=view)

    def copied(self, nbytes: int, seconds: float) -> None:
        """Tell options how long a device took to copy experts by itself; see `Option.copied`."""
        for copied in self._copy_observers:
            copied(nbytes, seconds)
