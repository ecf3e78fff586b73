"""What a site does with a coordinator's messages, by its own rules, whatever brings the messages.

A site trusts nobody with code: code that a config names is refused before anything is imported,
unless it is one of the files that the site itself allows, unchanged. Its data is what its own
``site.toml`` says. Every answer is written to the log ``sent.jsonl`` before it leaves.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..core.metrics import METRICS
from ..engines.codec import read_head
from ..engines.site import Disclosure, Site, judged
from ..errors import ConfigError, CoterieError, EngineError, StoreError, printable
from ..runs import environment
from ..storage import files
from .allowed_code import allowed_code
from .holdings import Division, Holdings, division_of
from .protocol import (
    Consent,
    DivisionReport,
    DivisionRequest,
    Introduction,
    JudgeRequest,
    Nothing,
    PoolRequest,
    Proposal,
    arrays_of,
    payload_of,
    refusal,
    setup_message,
    sums_report,
)
from .sent_log import write_down
from .sharing import LARGEST_SHARE, unpacked
from .site_folder import SiteFolder
from .terms import Agreement, Experiment, experiment_of

AGREEMENT, POOL = "agreement.json", "pool.bin"
RAW_SAMPLES = (
    "the method sends raw samples of every site to all others, and this site's [consent] samples "
    "is false"
)
WITHDRAWN = "withdrawn.json"  # in a site's folder, once it has left the federation
MOST_OPEN = 4  # experiments that are kept in memory
MOST_PAIRS = 1000  # seeds of a comparison

_LOG = logging.getLogger(__name__)


class _ForbiddenError(ConfigError):
    """A message that the site's own rules forbid; the text is told to the coordinator."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class SiteHandler:
    """Answers the coordinator for one site; ``accepts`` may refuse an experiment (ConfigError)."""

    def __init__(
        self,
        folder: SiteFolder,
        holdings: Holdings,
        accepts: Callable[[Experiment], None] | None = None,
    ) -> None:
        self._folder, self._holdings, self._accepts = folder, holdings, accepts
        self._open: dict[str, tuple[Experiment, Site]] = {}
        self._code = allowed_code(folder)

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; a refusal, never an exception, if the message is not accepted.

        Sentences about the site's data stay in the site's own log: they may quote a cell.
        """
        head = read_head(data)
        try:
            reply = self._answered(head, data)
        except ConfigError as error:
            _LOG.warning("refused: %s", printable(str(error)))
            reason = error.reason if isinstance(error, _ForbiddenError) else "refused"
            reply = refusal(reason, str(error))
        except Exception as error:
            trace = None if isinstance(error, CoterieError) else error
            _LOG.error("failed: %s", printable(str(error)), exc_info=trace)
            reply = refusal("refused", f"failed ({type(error).__name__}); the site's log says why")
        write_down(self._folder.sent, head, reply, self._agreed(head))
        return reply

    def _answered(self, head: Mapping[str, Any], data: bytes) -> bytes:
        if (self._folder.path / WITHDRAWN).exists():
            raise _ForbiddenError("withdrawn", "this site has left the federation")
        kind = head.get("kind")
        answers: dict[Any, Callable[[bytes], bytes]] = {
            "who": self._who,
            "divide": self._divide,
            "squares": self._squares,
            "agree": self._agree,
            "samples": self._samples,
            "judge": self._judge,
            "local": partial(self._in_round, head),
            "predict": partial(self._in_round, head),
        }
        if not isinstance(kind, str) or kind not in answers:
            raise _ForbiddenError("unreadable", f"a site knows no message '{str(kind)[:40]}'")
        return answers[kind](data)

    # ---- before an experiment ------------------------------------------------------------------

    def _who(self, data: bytes) -> bytes:
        payload_of(data, Nothing)
        versions = {"coterie": __version__, "source": environment.fingerprint()}
        schema = self._holdings.schema().to_json()
        return setup_message("who", Introduction(self._folder.name, schema, versions))

    def _divide(self, data: bytes) -> bytes:
        division = division_of(payload_of(data, DivisionRequest))
        facts = self._holdings.facts(division, classes=self._folder.consent.counts)
        sums = sums_report(self._holdings.sums(division))
        report = DivisionReport(facts.counts, *facts.seal, facts.weak, facts.classes, sums)
        return setup_message("divide", report)

    def _squares(self, data: bytes) -> bytes:
        asked = payload_of(data, DivisionRequest)
        found = self._holdings.squares(division_of(asked), np.array(asked.means))
        return setup_message("squares", sums_report(found))

    def _samples(self, data: bytes) -> bytes:
        """Raw samples for a pool of all sites; they leave only with the owner's consent."""
        asked = payload_of(data, PoolRequest)
        if not self._folder.consent.samples or not 0 <= asked.share <= LARGEST_SHARE:
            raise _ForbiddenError("refused", RAW_SAMPLES)
        shared = self._holdings.shared(division_of(asked.division), asked.share)
        return setup_message("samples", Nothing(), *shared)

    def _agree(self, data: bytes) -> bytes:
        """Check the terms of an experiment, write them down, and make the first state."""
        agreement = Agreement.from_json(payload_of(data, Proposal).agreement)
        pool = b"".join(bytes(part.numpy()) for part in arrays_of(data))
        experiment, site = self._made(agreement, pool)
        self._check(experiment)
        folder = site.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if agreement.pool:
            with files.whole(folder / POOL) as temporary:
                temporary.write_bytes(pool)
        files.write_text(folder / AGREEMENT, agreement.to_json() + "\n")
        self._remember(agreement.hash, (experiment, site))
        return setup_message("agree", Consent(agreement.hash, site.start()))

    def _check(self, experiment: Experiment) -> None:
        """Refuse terms that the site did not consent to, or that are not about its own data."""
        if self._accepts is not None:
            self._accepts(experiment)
        consent, traits = self._folder.consent, experiment.algorithm.traits
        if traits.sharing is not None and not consent.samples:
            raise _ForbiddenError("refused", RAW_SAMPLES)
        if traits.discloses and not getattr(consent, traits.discloses):
            raise _ForbiddenError(
                "refused",
                f"the method sends more of a site's data than models, and this site's [consent] "
                f"{traits.discloses} is false",
            )
        config, agreement = experiment.config, experiment.agreement
        data, seed = config.data, config.dealt(config.run.seed)
        division = Division(agreement.schema, data.scale, data.val, data.test, seed)
        own = self._holdings.facts(division, classes=False).counts
        said = agreement.counts[agreement.clients.index(self._folder.name)]
        if own != said:
            raise _ForbiddenError(
                "refused", f"the agreement says {said} of this site; its data gives {own}"
            )

    # ---- the rounds ----------------------------------------------------------------------------

    def _in_round(self, head: Mapping[str, Any], data: bytes) -> bytes:
        """Train or evaluate; a message that comes again is answered as before."""
        _, site = self.experiment(str(head.get("experiment", "")))
        again = site.repeated(data)
        if again is not None:
            return again
        reply = site.answer(data)
        site.remember(data, reply)
        return reply

    def _judge(self, data: bytes) -> bytes:
        asked = payload_of(data, JudgeRequest)
        if asked.metric not in METRICS or not 1 <= len(asked.pairs) <= MOST_PAIRS:
            raise EngineError("judge: found an unknown metric, or no or too many pairs of runs")
        pairs = [(self._place(ours), self._place(local)) for ours, local in asked.pairs]
        return setup_message("judge", judged(asked.metric, pairs).to_json())

    # ---- experiments -----------------------------------------------------------------------------

    def _place(self, experiment: str) -> Path:
        """The folder of an experiment that was agreed to."""
        if len(experiment) != 64 or not {*experiment} <= {*"0123456789abcdef"}:
            raise _ForbiddenError("unreadable", "an experiment is known by its sha256")
        folder = self._folder.experiments / experiment
        if not (folder / AGREEMENT).is_file():
            raise _ForbiddenError("not_agreed", f"no experiment {experiment[:12]} was agreed to")
        return folder

    def experiment(self, name: str) -> tuple[Experiment, Site]:
        """An experiment that was agreed to, by its hash, and the site's part of it."""
        if name not in self._open:
            path = self._place(name) / AGREEMENT
            agreement = Agreement.from_json(path.read_text(encoding="utf-8"))
            if agreement.hash != name:
                raise StoreError(f"{path}: has changed since it was agreed to; it is not used")
            stored = path.parent / POOL
            pool = stored.read_bytes() if agreement.pool and stored.is_file() else b""
            self._remember(name, self._made(agreement, pool))
        return self._open[name]

    def _remember(self, name: str, made: tuple[Experiment, Site]) -> None:
        self._open.pop(name, None)
        self._open[name] = made  # the newest is the last
        for key in [*self._open][:-MOST_OPEN]:
            del self._open[key]

    def _made(self, agreement: Agreement, pool: bytes) -> tuple[Experiment, Site]:
        """The site's part of an experiment: its client number, its problem, its samples."""
        if self._folder.name not in agreement.clients:
            raise _ForbiddenError("wrong_client", f"'{self._folder.name}' is not among the clients")
        secret = int.from_bytes(self._folder.secret()[:8], "little") >> 1
        most = self._folder.limits.message_mib * 2**20
        schema, population = agreement.schema, len(agreement.clients)
        shared = unpacked(pool, agreement.pool, schema, population) if agreement.pool else None
        experiment = experiment_of(
            agreement, self._code, secret=secret, most_bytes=most, pool=shared
        )
        consent = self._folder.consent
        shards = functools.cache(partial(self._holdings.shards, experiment))
        site = Site(
            self._folder.experiments / agreement.hash,
            agreement.clients.index(self._folder.name),
            experiment.problem,
            experiment.algorithm,
            shards,
            Disclosure(shown=consent.shown, models=consent.models),
            kept=agreement.kept,
        )
        return experiment, site

    def _agreed(self, head: Mapping[str, Any]) -> str:
        """The experiment that the site has just agreed to, if the message was about one."""
        return next(reversed(self._open), "") if head.get("kind") == "agree" else ""
