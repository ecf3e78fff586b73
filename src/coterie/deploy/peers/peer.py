"""A site that runs decentralised FedeRiCo with its peers, without a server.

In a round (:mod:`coterie.deploy.peers.meeting`) the site fetches the models that it chose, weighs
and trains them, sends each owner its weighted change, and adds what others send for its own model,
in the order of client numbers. It stores the result and reports that it is done; the result takes
effect when the convener closes the round (:mod:`coterie.deploy.peers.talk`). After the last round
the sites fetch the models that they predict with in the same way.

A site that is killed continues in the round it was in; what it computes again is the same.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.algorithm import Mixture, round_of
from ...core.messages import REASONS, Rejection
from ...core.tree import Tree
from ...errors import ConfigError, EngineError, StoreError
from ...training.rounds import participants
from .meeting import Meeting, SupersededError
from .sealing import PeerIdentity
from .talk import Correspondence, Decision, Letter, Link, PeerFolder, RollCall
from .work import Change, Mine, OwnPart, change_of, checked_change, checked_model

Note = Callable[[str], None]


@dataclass(frozen=True)
class PeerPlan:
    """What all sites of an experiment agree on.

    Fields:
        experiment: hash of everything that the sites agreed on; other messages are refused.
        rounds: number of rounds.
        participation: share of the sites that is drawn for each round.
        metric: of the scores at the end.
        nudge: seconds after which a site asks again for what does not come.
        patience: seconds without a sign after which a site is left out of a round; more than the
            longest training at any site.
    """

    experiment: str
    rounds: int
    participation: float = 1.0
    metric: str = "accuracy"
    nudge: float = 5.0
    patience: float = 600.0


class PeerResult(NamedTuple):
    """A site's predictor after the last round, and its scores: test, val and their losses."""

    mixture: Mixture
    scores: Tensor  # [4]


class PeerSite:
    """One site's part of an experiment."""

    def __init__(
        self,
        part: OwnPart,
        plan: PeerPlan,
        identity: PeerIdentity,
        link: Link,
        folder: PeerFolder,
        note: Note,
    ) -> None:
        self._part, self._plan, self._folder, self._note = part, plan, folder, note
        self._names, self._me = part.problem.clients, identity.name
        self._check(identity)
        kept = folder.open()
        new: dict[str, Any] = {"round": 0, "boot": 0, "counters": {}}
        head = new if kept is None else kept.head
        self._round = int(head["round"])
        self._boot = max(int(head["boot"]) + 1, time.time_ns())  # grows, even from a backup
        self._mine = part.begin() if kept is None else Mine(*kept.body)
        self._talk = Correspondence(identity, folder, link, self._boot, head["counters"], note)
        self._save()
        convener, roll = self._names[0], None
        if self._me == convener:
            known, now = folder.decisions(), time.monotonic()
            roll = RollCall(self._sites, plan.rounds, plan.patience, known, now)
        self._convenes = roll is not None
        keep, nudge = folder.keep_decisions, plan.nudge
        self._meeting = Meeting(self._me, convener, self._talk, roll, keep, nudge, note)

    def _check(self, identity: PeerIdentity) -> None:
        pinned = sorted(identity.pinned.keys)
        if self._names[self._part.me] != self._me or pinned != sorted(self._names):
            raise ConfigError(
                f"roster: found '{self._me}' among {', '.join(pinned)}; expected "
                f"'{self._names[self._part.me]}' among the sites of the experiment: "
                f"{', '.join(self._names)}"
            )

    # ---- the run ---------------------------------------------------------------------------

    def run(self) -> PeerResult:
        """Take part in all rounds; returns when all sites have what they predict with."""
        while self._round < self._plan.rounds:
            result = self._take_part()
            self._mine = self._mine if result is None else Mine(*result)
            self._round += 1
            self._save()
        result = self._take_part()
        if result is None:
            raise EngineError(
                f"'{self._me}' was left out when the sites fetched the models to predict with, "
                "because it gave no sign for too long; its own model is in its folder"
            )
        self._meeting.leave(self._plan.patience)
        weights, models, scores = result
        return PeerResult(Mixture(weights, models), scores)

    def _sites(self, round: int) -> tuple[str, ...]:
        """The sites that are drawn for a round; all of them after the last one."""
        if round >= self._plan.rounds:
            return self._names
        part, share = self._part, self._plan.participation
        drawn = participants(part.algorithm, part.problem, round, share)
        return tuple(self._names[number] for number in drawn.tolist())

    def _take_part(self) -> Tree | None:
        """The result of the current round; None where this site takes no part in it."""
        sites, meeting = self._sites(self._round), self._meeting
        if self._me not in sites and not self._convenes:
            return None
        meeting.enter(self._round, sites, self._mine.held.model)
        while True:
            decision = meeting.decided()
            if self._me not in decision.names:
                meeting.closed()
                return None
            if decision.closed:
                return self._stored(decision)
            with contextlib.suppress(SupersededError):
                meeting.begin(decision)
                ends = self._round == self._plan.rounds
                result = self._predict(decision) if ends else self._train(decision)
                self._folder.prepare(self._round, decision.attempt, result)
                meeting.done()
                meeting.closed()

    def _stored(self, decision: Decision) -> Tree:
        """What this site computed in an attempt that is closed."""
        result = self._folder.prepared(decision.round, decision.attempt)
        if result is None:
            raise StoreError(
                f"{self._folder.path}: round {decision.round} was closed with this site's work, "
                "which is not here: the folder is older than what the site has sent; restore the "
                "newest backup, or withdraw from this experiment"
            )
        return result

    # ---- one attempt -----------------------------------------------------------------------

    def _train(self, decision: Decision) -> Tree:
        """The state after the round, if the attempt is closed."""
        part, meeting = self._part, self._meeting
        others = [name for name in decision.names if name != self._me]
        numbers = torch.tensor([self._names.index(name) for name in decision.names])
        round = round_of(part.problem, decision.round, self._plan.rounds, numbers)
        chosen = part.chosen(self._mine, round)
        models = self._fetched(chosen, others)
        reply, tracked = part.local(self._mine, chosen, models, round)
        sound = part.sound(reply, round)
        for slot, owner in enumerate(chosen, 1):
            body = change_of(reply, slot) if sound else ()
            meeting.push(self._names[owner], "change", {}, body)
        wants = meeting.gather("want", others)
        users = [name for name, letter in wants.items() if letter.head["wants"] is True]
        changes = self._changes(meeting.gather("change", users))
        kept = tracked if sound else None
        after, rejected = part.after(self._mine, reply, kept, changes, round)
        self._tell(rejected)
        return tuple(after)

    def _predict(self, decision: Decision) -> Tree:
        """The predictor and its scores, with the models of the sites that are there."""
        rounds = self._plan.rounds
        owners = self._part.predicts_with(self._mine, rounds)
        there = [owner for owner in owners if self._names[owner] in decision.names]
        models = self._fetched(there, ())
        found = self._part.predicted(self._mine, owners, models, rounds, self._plan.metric)
        scores = torch.tensor([float(column[0]) for column in found.evaluation]).double()
        return (found.mixture.weights[0], found.mixture.models[0], scores)

    def _fetched(self, chosen: Sequence[int], others: Iterable[str]) -> dict[int, Tensor]:
        """The models of the chosen clients; ``others`` are told whether they are among them."""
        names = {self._names[owner]: owner for owner in chosen}
        for name in dict.fromkeys((*names, *others)):
            self._meeting.push(name, "want", {"wants": name in names})
        models = {}
        for name, letter in self._meeting.gather("model", names).items():
            model, reason = checked_model(letter.body, self._mine.held.model, self._part.guard)
            if reason is None:
                models[names[name]] = model
            else:
                self._tell([Rejection(names[name], reason)])
        return models

    def _changes(self, letters: Mapping[str, Letter]) -> dict[int, Change]:
        """The changes that can be read, by client; a site that diverged has sent none."""
        changes = {}
        for name, letter in letters.items():
            change, reason = checked_change(letter.body, self._mine.held.model)
            client = self._names.index(name)
            if change is not None:
                changes[client] = change
            elif reason is not None:
                self._tell([Rejection(client, reason)])
        return changes

    def _tell(self, rejected: Iterable[Rejection]) -> None:
        for client, reason in rejected:
            said = f"what '{self._names[client]}' sent is left out ({reason})"
            self._note(f"round {self._round}: {said}: {REASONS[reason]}")

    def _save(self) -> None:
        self._folder.save(self._round, self._boot, self._talk.counters, tuple(self._mine))
