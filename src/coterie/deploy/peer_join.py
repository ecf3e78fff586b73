"""A site's part of an experiment among peers, with its own data: from the setup to its own model.

The convener, the first site of the roster in client order, proposes the experiment. All others
answer its setup messages by their own rules and data (:class:`coterie.deploy.handler.SiteHandler`).
Then the sites run the rounds (:mod:`coterie.deploy.peer`), and each keeps its own final model.

    peers/HASH/               in the site's folder: counters of the setup messages of one roster,
                              and current.json, the experiment that the site agreed to last
    experiments/HASH/         agreement, final model, answers; as with a coordinator
    experiments/HASH/peers/   the states of the rounds (:mod:`coterie.deploy.peer_folder`)
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core.algorithm import client_digest
from ..engines.codec import digest, vocabulary
from ..engines.site import ANSWERS, MODEL
from ..errors import ConfigError, StoreError
from ..runs.config.schema import Config, GuardTable
from ..runs.plan import Plan
from ..storage import files
from ..training.guard import Guard
from .federated import federated
from .handler import WITHDRAWN, SiteHandler
from .holdings import Holdings
from .peer import PeerPlan, PeerSite
from .peer_folder import PEERS, PeerFolder
from .peer_keys import PeerIdentity
from .peer_link import Link
from .peer_setup import AgreedError, Note, SealedTransport, SetupDoor, SetupTalk, roster_hash
from .peer_work import OwnPart, serverless
from .site_folder import SiteFolder
from .terms import Experiment, shared_config

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
