"""A site's part of an experiment among peers: from the sealed setup to its own model.

The sealed messages before the first round:

    ask     from the convener: a setup message (:mod:`coterie.deploy.protocol`), sealed for one site
    answer  to the convener: what the site's own handler answered

The convener asks through a :class:`SealedTransport`. Every other site has a :class:`SetupDoor` in
front of its link, which answers the convener and nobody else, at any time: a convener that was
killed asks again while others are in a round already.

The convener, the first site of the roster in client order, proposes the experiment. All others
answer its setup messages by their own rules and data (:class:`coterie.deploy.handler.SiteHandler`).
Then the sites run the rounds (:mod:`coterie.deploy.peers.peer`); each keeps its own final model.

    peers/HASH/               in the site's folder: counters of the setup messages of one roster,
                              and current.json, the experiment that the site agreed to last
    experiments/HASH/         agreement, final model, answers; as with a coordinator
    experiments/HASH/peers/   the states of the rounds (:mod:`coterie.deploy.peers.talk`)
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import client_digest
from ...core.tree import Tree
from ...data.data_schema import client_order
from ...engines.codec import digest, read_head, vocabulary
from ...engines.remote import Answering, SiteState
from ...engines.site import ANSWERS, MODEL
from ...errors import ConfigError, CoterieError, EngineError, StoreError
from ...runs.config.schema import Config, GuardTable
from ...runs.plan import Plan
from ...storage import files
from ...training.guard import Guard
from ..federated import federated
from ..handler import WITHDRAWN, SiteHandler
from ..holdings import Holdings
from ..protocol import Consent, as_array, payload_of, refusal, refused_by
from ..site_folder import SiteFolder
from ..terms import Experiment, shared_config
from .peer import PeerPlan, PeerSite
from .sealing import PeerIdentity, PeerKeys, SealError
from .talk import PEERS, Correspondence, Letter, Link, PeerFolder
from .work import OwnPart, serverless

SETUP_KINDS = ("who", "ask", "describe", "divide", "agree")  # what a peer answers, and nothing else
SLOWEST_RETRY = 60.0  # seconds after which the convener asks again, at most
SEALED = dict.fromkeys(("ask", "answer"), range(1))  # the kinds of sealed messages

Note = Callable[[str], None]


class AgreedError(Exception):
    """The site has agreed to another experiment than the one it works on."""

    def __init__(self, experiment: str) -> None:
        super().__init__(experiment)
        self.experiment = experiment


def roster_hash(pinned: PeerKeys) -> str:
    """A hash of all names and keys: setup messages of another roster are refused."""
    said = json.dumps(sorted(pinned.fingerprints().items()))
    return hashlib.sha256(said.encode()).hexdigest()


class SetupTalk:
    """One site's sealed setup messages. The folder holds the counters, so that none is replayed."""

    def __init__(self, identity: PeerIdentity, path: Path, link: Link, note: Note) -> None:
        self.names = client_order(identity.pinned.keys)
        self.me, self.convener = identity.name, self.names[0]
        self._folder = PeerFolder(path, roster_hash(identity.pinned), {})
        kept = self._folder.open()
        new: dict[str, Any] = {"boot": 0, "counters": {}}
        head = new if kept is None else kept.head
        self.boot = max(int(head["boot"]) + 1, time.time_ns())
        counters = head["counters"]
        self._talk = Correspondence(identity, self._folder, link, self.boot, counters, note)
        self._save()

    def send(self, to: str, kind: str, number: int, data: bytes) -> None:
        """Seal and send a message; ``number`` is that of the question."""
        self._talk.send(to, 0, kind, {"number": number}, as_array(data))

    def read(self, data: bytes) -> Letter:
        """A setup message; a SealError or an EngineError if it is none, or is refused."""
        letter = self._talk.read(data, SEALED)
        self._save()
        return letter

    def _save(self) -> None:
        self._folder.save(0, self.boot, self._talk.counters, ())


class SealedTransport:
    """Carries the convener's setup messages to its peers, sealed for each of them.

    It waits for every site, however long that takes: sites are started by people. The convener's
    own handler is asked last, when all others have answered.
    """

    def __init__(
        self, talk: SetupTalk, link: Link, own: Answering, note: Note, nudge: float
    ) -> None:
        self._talk, self._link, self._own, self._note = talk, link, own, note
        self._nudge, self._number = nudge, talk.boot

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """Each site's answer."""
        me, pause = self._talk.me, self._nudge
        self._number += 1
        missing = [name for name in requests if name != me]
        answers: dict[str, bytes | str] = {}
        while missing:
            for name in missing:
                self._talk.send(name, "ask", self._number, requests[name])
            self._listen({*missing}, answers, pause)
            missing = [name for name in missing if name not in answers]
            if missing:
                self._note(f"waiting for an answer of {', '.join(missing)}")
            pause = min(2 * pause, max(SLOWEST_RETRY, self._nudge))
        return answers | ({me: self._own.answer(requests[me])} if me in requests else {})

    def _listen(self, names: set[str], answers: dict[str, bytes | str], seconds: float) -> None:
        """Add the answers that come in this time."""
        end = time.monotonic() + seconds
        while names - answers.keys() and (left := end - time.monotonic()) > 0:
            data = self._link.fetch(left)
            letter = None if data is None else _setup_letter(self._talk, data, self._note)
            if letter is None or letter.kind != "answer" or letter.sender not in names:
                continue
            if letter.head.get("number") == self._number:
                answers[letter.sender] = _bytes(letter.body)

    def sites(self) -> Mapping[str, SiteState]:
        """The sites of the roster; nothing is known of them before they answer."""
        return dict.fromkeys(self._talk.names, SiteState(online=False, seen=None))

    def close(self) -> None:
        """Do nothing: the link belongs to the caller."""


class SetupDoor:
    """A link that answers the convener's setup messages, and passes all other messages on.

    ``keep`` stores the hash of an experiment that the site has just agreed to. If it is another
    one than ``running``, :meth:`fetch` raises an AgreedError.
    """

    def __init__(
        self,
        talk: SetupTalk,
        link: Link,
        handler: Answering,
        keep: Callable[[str], None],
        note: Note,
        running: str = "",
    ) -> None:
        self._talk, self._link, self._handler = talk, link, handler
        self._keep, self._note, self._running = keep, note, running
        self._last: tuple[int, bytes] = (-1, b"")  # the number of a question, and its answer

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        return self._link.send(to, blob)

    def fetch(self, seconds: float) -> bytes | None:
        """The next message that is no setup message."""
        end = time.monotonic() + seconds
        while (data := self._link.fetch(max(0.0, end - time.monotonic()))) is not None:
            try:
                letter = self._talk.read(data)
            except SealError as error:
                if error.reason == "experiment":
                    return data
                self._note(str(error))
            except EngineError as error:
                self._note(str(error))
            else:
                self._handle(letter)
        return None

    def _handle(self, letter: Letter) -> None:
        """Answer a question of the convener; a question that comes again is answered as before."""
        number = letter.head.get("number")
        if letter.kind != "ask" or type(number) is not int:
            return
        if letter.sender != self._talk.convener:
            said = f"a setup message of '{letter.sender}' is refused: the convener is"
            self._note(f"{said} '{self._talk.convener}', the first site of the roster")
            return
        agreed = ""
        if number != self._last[0]:
            reply = self._answer(_bytes(letter.body))
            self._last, agreed = (number, reply), _agreed(reply)
        if agreed:
            self._keep(agreed)
        self._talk.send(letter.sender, "answer", *self._last)
        if agreed not in ("", self._running):
            raise AgreedError(agreed)

    def _answer(self, data: bytes) -> bytes:
        try:
            kind = read_head(data).get("kind")
            if kind not in SETUP_KINDS:
                known = ", ".join(SETUP_KINDS)
                return refusal("refused", f"a peer answers {known}; found '{str(kind)[:40]}'")
            return self._handler.answer(data)
        except CoterieError as error:
            self._note(f"a setup message cannot be read: {error}")
            return refusal("unreadable")


def _setup_letter(talk: SetupTalk, data: bytes, note: Note) -> Letter | None:
    """A setup message; None for one that is refused, which is noted, or of an experiment."""
    try:
        return talk.read(data)
    except SealError as error:
        if error.reason != "experiment":
            note(str(error))
    except EngineError as error:
        note(str(error))
    return None


def _agreed(reply: bytes) -> str:
    """The experiment that a site's answer agrees to; "" if the answer is another one."""
    if refused_by(reply) is not None or read_head(reply).get("kind") != "agree":
        return ""
    return payload_of(reply, Consent).experiment


def _bytes(body: Tree) -> bytes:
    """The bytes of a sealed setup message; empty, which no reader accepts, if it holds none."""
    whole = isinstance(body, Tensor) and body.dtype == torch.uint8
    return bytes(body.numpy()) if whole else b""


# ---- the rounds ----------------------------------------------------------------------------------


CURRENT = "current.json"
NUDGE = 5.0  # seconds after which a site asks again for what does not come


@dataclass(frozen=True)
class JoinedResult:
    """What a site has after the last round."""

    experiment: str
    metric: str
    score: float  # on the site's own test samples
    digest: str  # of its predictor
    model: Path


class JoiningSite:
    """One site among the peers of a roster. A site that was killed continues where it was."""

    def __init__(
        self,
        folder: SiteFolder,
        holdings: Holdings,
        identity: PeerIdentity,
        link: Link,
        note: Note,
        nudge: float = NUDGE,
    ) -> None:
        if (folder.path / WITHDRAWN).exists():
            raise ConfigError(
                f"{folder.path}: this site has withdrawn from the federation; make a new folder "
                "with 'coterie site init' to join again"
            )
        self._folder, self._identity, self._link = folder, identity, link
        self._note, self._nudge = note, nudge
        self._home = folder.path / PEERS / roster_hash(identity.pinned)
        self._talk = SetupTalk(identity, self._home, link, note)
        accepts = partial(refuse_other_terms, self._talk.names)
        self._handler = SiteHandler(folder, holdings, accepts)

    def run(self, config: Config | None) -> JoinedResult:
        """Agree on an experiment and take part in it; only the convener has a config."""
        self._check(config)
        asked = "" if config is None else digest(shared_config(config).encode())
        experiment = self._unfinished(asked)
        while True:
            try:
                experiment = experiment or self._agreed(config, asked)
                return self._rounds(experiment)
            except AgreedError as agreed:
                experiment = agreed.experiment

    def _check(self, config: Config | None) -> None:
        convener, me = self._talk.convener, self._folder.name
        if (config is not None) != (me == convener):
            found = "none" if config is None else "one"
            raise ConfigError(
                f"--config: found {found} at '{me}'; expected one at '{convener}', the first site "
                "of the roster in the order of names, and at no other: it proposes the experiment"
            )
        if config is None:
            return
        serverless(config.method().build())
        if config.guard != GuardTable():
            raise ConfigError(
                "guard: every peer checks what arrives by the default guard; leave [guard] out"
            )

    # ---- before the rounds ---------------------------------------------------------------------

    def _unfinished(self, asked: str) -> str:
        """The experiment that the site agreed to last, if it has not ended; "" otherwise."""
        files.refuse_links(self._home, [CURRENT], depth=0)
        if not (self._home / CURRENT).exists():
            return ""
        kept: Any = files.read_json(self._home / CURRENT)
        try:
            experiment, before = str(kept["experiment"]), kept["asked"]
        except (TypeError, KeyError) as error:
            raise StoreError(f"{self._home / CURRENT}: names no experiment; delete it") from error
        site = self._handler.experiment(experiment).site
        ended = (site.folder / ANSWERS).is_file()
        return "" if ended or before != asked else experiment

    def _keep(self, asked: str, experiment: str) -> None:
        files.write_json(self._home / CURRENT, {"experiment": experiment, "asked": asked})

    def _agreed(self, config: Config | None, asked: str) -> str:
        """The experiment that all sites agreed to: proposed here, or by the convener."""
        if config is None:
            self._note(f"waiting for '{self._talk.convener}' to propose an experiment")
            door = self._door("")
            while True:
                door.fetch(self._nudge)  # ends by an AgreedError
        transport = SealedTransport(self._talk, self._link, self._handler, self._note, self._nudge)
        setting = federated(config, transport, PEERS, self._folder.federation)
        cell = Plan.single(setting.config, None).cells[0]
        experiment, _ = setting.agreed(cell)
        self._keep(asked, experiment)
        return experiment

    def _door(self, running: str) -> SetupDoor:
        keep = partial(self._keep, "")
        return SetupDoor(self._talk, self._link, self._handler, keep, self._note, running)

    # ---- the rounds ----------------------------------------------------------------------------

    def _rounds(self, experiment: str) -> JoinedResult:
        made, site, _ = self._handler.experiment(experiment)
        run, method = made.config.run, site.algorithm
        self._note(f"experiment {experiment[:12]}: {run.rounds} rounds")
        part = OwnPart(site.problem, site.shards(), method, site.client, Guard())
        plan = PeerPlan(
            experiment,
            run.rounds,
            run.participation,
            run.metric,
            self._nudge,
            self._folder.limits.seconds,
        )
        kept = PeerFolder(site.folder / PEERS, experiment, vocabulary(method))
        door = self._door(experiment)
        found = PeerSite(part, plan, self._identity, door, kept, self._note).run()
        predictor, served = found.mixture, bool((found.mixture.weights != 0).any())
        score = float(found.scores[0]) if served else math.nan
        site.keep(predictor, part.answered(predictor, run.rounds, run.metric), score)
        digested = client_digest(predictor)
        return JoinedResult(experiment, run.metric, score, digested, site.folder / MODEL)


def refuse_other_terms(names: tuple[str, ...], experiment: Experiment) -> None:
    """Refuse an experiment that is not one among exactly these peers, without a server."""
    serverless(experiment.algorithm)
    if experiment.agreement.clients != names:
        raise ConfigError(
            f"agreement.clients: found {', '.join(experiment.agreement.clients)}; expected the "
            f"sites of this site's roster: {', '.join(names)}"
        )
