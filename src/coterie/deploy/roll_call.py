"""Who takes part in a round among peers: one site, the convener, decides, and all others follow.

A site reports where it is: ``here`` at the start of a round, ``working``, and ``done`` when it has
stored its result. The convener begins an attempt of the round with the sites that are here, and
closes the round when all of them are done. A site that gives no sign for ``patience`` seconds is
left out: the round is repeated without it, as if it had not been drawn to take part. So a closed
round is always the simulator's round with the sites of its last attempt.

The convener learns who is there and nothing else. It waits while at most half of a round's sites
are there, so that two halves of a network never go on apart; round 0 waits for all its sites. If
the convener is gone, all others wait for it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

Stage = Literal["here", "working", "done"]
STAGES: tuple[Stage, ...] = ("here", "working", "done")


class Decision(NamedTuple):
    """The convener's word on a round: who takes part in its newest attempt, and if it ended."""

    round: int
    attempt: int
    names: tuple[str, ...]  # in the order of client numbers
    closed: bool = False

    @property
    def roll(self) -> str:
        """A hash of the attempt, which all its messages carry: all of them have the same roll."""
        told = json.dumps([self.round, self.attempt, self.names])
        return hashlib.sha256(told.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The decision in types of JSON."""
        return {**self._asdict(), "names": list(self.names)}

    @classmethod
    def from_json(cls, value: Any) -> "Decision":
        """The decision that :meth:`to_json` wrote; ValueError, TypeError or KeyError otherwise."""
        round, attempt, closed = value["round"], value["attempt"], value["closed"]
        names = tuple(value["names"])
        types = (type(round), type(attempt), type(closed))
        if types != (int, int, bool) or not all(isinstance(name, str) for name in names):
            raise ValueError("the fields of a decision have other types")
        return cls(round, attempt, names, closed)


class RollCall:
    """The convener's part. ``decisions`` are those made so far, the newest of each round."""

    def __init__(
        self,
        sites_of: Callable[[int], Sequence[str]],
        last: int,
        patience: float,
        decisions: Sequence[Decision],
        now: float,
    ) -> None:
        self.sites_of, self._last, self._patience = sites_of, last, patience
        self._decisions = {decision.round: decision for decision in decisions}
        self._at: dict[str, int] = {}  # the round that each site is in
        self._signs: dict[str, float] = {}  # when each site was last heard of
        self._done: set[str] = set()  # sites that are done with the newest attempt
        self._absent: set[str] = set()  # sites that were left out and not heard of since
        self._began = now

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest decision of each round, to be kept before it is told."""
        return tuple(self._decisions.values())

    @property
    def round(self) -> int:
        """The first round that is not closed."""
        newest = max(self._decisions, default=0)
        return newest + 1 if newest in self._decisions and self._open is None else newest

    @property
    def all_left(self) -> bool:
        """Whether all sites of the last round have said that they are finished."""
        return all(self._at.get(name, 0) > self._last for name in self.sites_of(self._last))

    @property
    def _open(self) -> Decision | None:
        newest = self._decisions[max(self._decisions)] if self._decisions else None
        return None if newest is None or newest.closed else newest

    def heard(self, name: str, round: int, stage: Stage, attempt: int, now: float) -> None:
        """Note what a site reported."""
        self._at[name], self._signs[name] = round, now
        self._absent.discard(name)
        current = self._open
        if current is not None and (round, attempt, stage) == (*current[:2], "done"):
            self._done.add(name)

    def about(self, round: int) -> Decision | None:
        """The newest decision on a round."""
        return self._decisions.get(round)

    def decide(self, now: float) -> Decision | None:
        """The next decision, if one is due."""
        if self.round > self._last:
            return None
        current = self._open
        decision = self._first(now) if current is None else self._next(current, now)
        if decision is not None:
            self._decisions[decision.round] = decision
            self._began, self._done = now, set()
        return decision

    def _first(self, now: float) -> Decision | None:
        """The first attempt of a round, when all are here or enough of them for long enough."""
        round = self.round
        sites = self.sites_of(round)
        here = tuple(name for name in sites if self._at.get(name) == round)
        everybody = set(sites) - self._absent <= set(here)
        late = round > 0 and now - self._began > self._patience
        if len(here) == len(sites) or ((everybody or late) and self._enough(here, round)):
            self._absent |= set(sites) - set(here)
            return Decision(round, 0, here)
        return None

    def _next(self, current: Decision, now: float) -> Decision | None:
        """Close the round, or repeat it without sites that gave no sign for too long."""
        if self._done >= set(current.names):
            return current._replace(closed=True)
        silent = {
            name
            for name in current.names
            if now - max(self._signs.get(name, 0.0), self._began) > self._patience
        }
        left = tuple(name for name in current.names if name not in silent)
        if not silent or not self._enough(left, current.round):
            return None
        self._absent |= silent
        return Decision(current.round, current.attempt + 1, left)

    def _enough(self, names: Sequence[str], round: int) -> bool:
        return 2 * len(names) > len(self.sites_of(round))
