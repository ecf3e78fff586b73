"""The messages of one round among peers, at one site: what is sent, what arrives, what is missing.

    stage     to the convener: where this site is; also its sign of life
    decision  from the convener: who takes part, whether the round is closed
    want      to every other site of the round: whether this site chose its model
    model     to every site that wants it
    change    to every site whose model was evaluated
    ask       to a site whose want or change does not come: send it again

A message of an attempt carries the hash of its roll, so that sites which were told different rolls
do not mix them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...core.tree import Tree
from ...errors import EngineError
from .talk import STAGES, Correspondence, Decision, Letter, RollCall, Stage

PIECES = ("want", "model", "change")  # what sites of a round exchange


class SupersededError(Exception):
    """The convener has ended this attempt: the round is closed, or another attempt began."""


class Meeting:
    """One site among its peers, round after round.

    ``keep`` stores the convener's decisions before they are told; only the convener has a ``roll``.
    """

    def __init__(
        self,
        me: str,
        convener: str,
        talk: Correspondence,
        roll: RollCall | None,
        keep: Callable[[Sequence[Decision]], None],
        nudge: float,
        note: Callable[[str], None],
    ) -> None:
        self._me, self._convener, self._talk, self._roll = me, convener, talk, roll
        self._keep, self._nudge, self._note = keep, nudge, note
        self._round = 0
        self._sites: tuple[str, ...] = ()
        self._stage: Stage = "here"
        self._told: Decision | None = None  # the newest decision on the round
        self._working: Decision | None = None  # the attempt that this site works on
        self._model: Tensor | None = None
        self._got: dict[str, dict[str, Letter]] = {}
        self._sent: dict[tuple[str, str], tuple[Mapping[str, Any], Tree]] = {}
        self._early: deque[Letter] = deque()

    @property
    def decision(self) -> Decision:
        """The newest decision on the round; an error before there is one."""
        if self._told is None:
            raise EngineError("there is no decision on this round yet; this is a bug in coterie")
        return self._told

    # ---- what a site does in a round -------------------------------------------------------

    def enter(self, round: int, sites: Sequence[str], model: Tensor) -> None:
        """Begin a round of these sites; ``model`` is sent to those that want it."""
        self._round, self._sites, self._model = round, tuple(sites), model
        self._told = self._working = None
        self._early = deque(maxlen=4 * len(sites))
        self._set("here")

    def decided(self) -> Decision:
        """Wait for a decision on the round."""
        self._working = None
        self._wait(lambda: self._told is not None)
        return self.decision

    def closed(self) -> None:
        """Wait until the round is closed."""
        self._wait(lambda: self.decision.closed)

    def begin(self, decision: Decision) -> None:
        """Begin an attempt: messages of other attempts are ignored from now on."""
        self._working = decision
        self._got, self._sent = {piece: {} for piece in PIECES}, {}
        self._set("working")
        early, self._early = self._early, deque(maxlen=self._early.maxlen)
        for letter in early:
            self._handle(letter)

    def push(self, to: str, kind: str, head: Mapping[str, Any], body: Tree = ()) -> None:
        """Send a piece of this attempt to a site."""
        self._sent[kind, to] = head, body
        self._speak(to, kind, head, body)

    def gather(self, piece: str, names: Iterable[str]) -> dict[str, Letter]:
        """Wait for a piece from each of these sites; ask again for what does not come."""
        wanted = set(names)
        self._wait(lambda: self._got[piece].keys() >= wanted, piece, wanted)
        return {name: self._got[piece][name] for name in wanted}

    def done(self) -> None:
        """Report that the result of this attempt is stored."""
        self._set("done")

    def leave(self, patience: float) -> None:
        """Say that this site is finished; the convener waits until all others have said so."""
        self._round += 1
        self._set("here")
        end, roll = time.monotonic() + patience, self._roll
        if roll is not None:
            self._wait(lambda: roll.all_left or time.monotonic() > end)

    # ---- waiting ---------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], piece: str = "", names: Iterable[str] = ()) -> None:
        asked = time.monotonic()
        while not ready():
            if (letter := self._talk.receive(0, self._rounds)) is not None:
                self._handle(letter)  # what waits here is heard before anybody is called silent
                continue
            self._convene()
            if ready():
                return
            if self._working is not None and self._working != self._told:
                raise SupersededError
            if (letter := self._talk.receive(self._nudge, self._rounds)) is not None:
                self._handle(letter)
            if time.monotonic() - asked > self._nudge:
                asked = time.monotonic()
                self._report()
                for name in set(names) - self._got.get(piece, {}).keys():
                    self._ask_again(name, piece)

    def _ask_again(self, name: str, piece: str) -> None:
        if piece == "model":  # the request for a model is this site's want
            self._speak(name, "want", *self._sent["want", name])
        else:
            self._speak(name, "ask", {"piece": piece})

    @property
    def _rounds(self) -> dict[str, range]:
        """Of which rounds a message may be now; sites report to the convener from any round."""
        now = range(self._round, self._round + 1)
        found = dict.fromkeys((*PIECES, "ask", "decision"), now)
        return found if self._roll is None else {**found, "stage": range(1 << 32)}

    # ---- messages --------------------------------------------------------------------------

    def _handle(self, letter: Letter) -> None:
        try:
            if letter.kind == "stage":
                self._on_stage(letter)
            elif letter.kind == "decision":
                self._on_decision(letter)
            else:
                self._on_piece(letter)
        except (KeyError, TypeError, ValueError) as error:
            self._note(f"a message of '{letter.sender}' ({letter.kind}) cannot be read: {error!r}")

    def _on_piece(self, letter: Letter) -> None:
        """Take a piece of this attempt; keep one of an attempt that has not begun here."""
        working = self._working
        if working is None or letter.head["attempt"] > working.attempt:
            self._early.append(letter)
            return
        if letter.head["roll"] != working.roll or letter.sender not in working.names:
            self._note(f"'{letter.sender}' sent a {letter.kind} of another attempt or roll")
            return
        if letter.kind == "ask":
            again = str(letter.head["piece"])
            if (again, letter.sender) in self._sent:
                self._speak(letter.sender, again, *self._sent[again, letter.sender])
            return
        self._got[letter.kind].setdefault(letter.sender, letter)
        if letter.kind == "want" and letter.head["wants"] is True:
            self._speak(letter.sender, "model", {}, self._model)

    def _speak(self, to: str, kind: str, head: Mapping[str, Any], body: Tree = ()) -> None:
        working = self._working or self.decision
        attempt = {"attempt": working.attempt, "roll": working.roll}
        self._talk.send(to, self._round, kind, {**head, **attempt}, body)

    # ---- the convener ----------------------------------------------------------------------

    def _set(self, stage: Stage) -> None:
        self._stage = stage
        self._report()

    def _report(self) -> None:
        """Tell the convener where this site is, in the attempt that it works on."""
        working, attempt, stage = self._working, 0, STAGES[0]
        if working is not None:
            attempt, stage = working.attempt, self._stage
        if self._roll is None:
            head = {"stage": stage, "attempt": attempt}
            self._talk.send(self._convener, self._round, "stage", head)
        else:
            self._roll.heard(self._me, self._round, stage, attempt, time.monotonic())
            self._adopt(self._roll.about(self._round))

    def _on_stage(self, letter: Letter) -> None:
        stage, attempt = letter.head["stage"], letter.head["attempt"]
        if self._roll is None or stage not in STAGES or type(attempt) is not int:
            raise ValueError("no stage of a round")
        self._roll.heard(letter.sender, letter.round, stage, attempt, time.monotonic())
        decision = self._roll.about(letter.round)
        if decision is not None:
            self._tell(letter.sender, decision)

    def _convene(self) -> None:
        """Where this site is the convener: decide what is due, and tell all sites concerned."""
        if self._roll is None:
            return
        self._report()
        while (decision := self._roll.decide(time.monotonic())) is not None:
            self._keep(self._roll.decisions)
            for name in self._roll.sites_of(decision.round):
                if name != self._me:
                    self._tell(name, decision)
            if decision.round == self._round:
                self._adopt(decision)

    def _tell(self, name: str, decision: Decision) -> None:
        self._talk.send(name, decision.round, "decision", decision.to_json())

    def _on_decision(self, letter: Letter) -> None:
        decision = Decision.from_json(letter.head)
        if letter.sender != self._convener or decision.round != letter.round:
            raise ValueError("a decision that is not the convener's")
        if tuple(name for name in self._sites if name in decision.names) != decision.names:
            raise ValueError("other sites than those drawn for this round, or in another order")
        self._adopt(decision)

    def _adopt(self, decision: Decision | None) -> None:
        """Follow a decision that is newer than the last one on this round."""
        told = self._told
        if decision is None or decision.round != self._round:
            return
        if told is None or (decision.attempt, decision.closed) > (told.attempt, told.closed):
            self._told = decision
