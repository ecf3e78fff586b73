"""What a site does with a coordinator's messages, by its own rules, whatever brings the messages.

A site trusts nobody with code: code that a config names is refused before anything is imported,
unless it is one of the files that the site itself allows, unchanged. Its data is what its own
``site.toml`` says. Every answer is written to the log ``sent.jsonl`` before it leaves.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.imports import Code
from ..core.metrics import METRICS
from ..data.data_schema import Schema
from ..engines.codec import digest, read_head
from ..engines.site import Disclosure, Site, judged
from ..errors import ConfigError, CoterieError, EngineError, StoreError, printable
from ..experiment import source
from ..storage import files
from .agreement import Agreement, Experiment, experiment_of
from .holdings import Division, Holdings
from .protocol import (
    Consent,
    DivisionReport,
    DivisionRequest,
    Introduction,
    JudgeRequest,
    Nothing,
    Proposal,
    means_of_request,
    payload_of,
    refusal,
    setup_message,
    sums_report,
)
from .site_folder import SiteFolder

AGREEMENT, CODE = "agreement.json", "code"
WITHDRAWN = "withdrawn.json"  # in a site's folder, once it has left the federation
MOST_OPEN = 4  # experiments that are kept in memory
MOST_PAIRS = 1000  # seeds of a comparison

_LOG = logging.getLogger(__name__)


class _RefusedError(Exception):
    """A message that the site's own rules forbid; the text is told to the coordinator."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class SiteHandler:
    """Answers the coordinator for one site."""

    def __init__(self, folder: SiteFolder, holdings: Holdings) -> None:
        self._folder, self._holdings = folder, holdings
        self._open: dict[str, tuple[Experiment, Site]] = {}
        self._code = allowed_code(folder)

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; a refusal, never an exception, if the message is not accepted.

        Sentences about the site's data stay in the site's own log: they may quote a cell.
        """
        head = read_head(data)
        try:
            reply = self._answered(head, data)
        except _RefusedError as error:
            _LOG.warning("refused: %s", printable(str(error)))
            reply = refusal(error.reason, str(error))
        except ConfigError as error:
            _LOG.warning("refused: %s", printable(str(error)))
            reply = refusal("refused", str(error))
        except Exception as error:
            known = isinstance(error, CoterieError)
            _LOG.error("failed: %s", printable(str(error)), exc_info=None if known else error)
            reply = refusal("refused", f"failed ({type(error).__name__}); the site's log says why")
        self._write_down(head, reply)
        return reply

    def _answered(self, head: Mapping[str, Any], data: bytes) -> bytes:
        if (self._folder.path / WITHDRAWN).exists():
            raise _RefusedError("withdrawn", "this site has left the federation")
        kind = head.get("kind")
        answers: dict[Any, Callable[[bytes], bytes]] = {
            "who": self._who,
            "divide": self._divide,
            "squares": self._squares,
            "agree": self._agree,
            "judge": self._judge,
            "local": partial(self._in_round, head),
            "predict": partial(self._in_round, head),
        }
        if not isinstance(kind, str) or kind not in answers:
            raise _RefusedError("unreadable", f"a site knows no message '{str(kind)[:40]}'")
        return answers[kind](data)

    # ---- before an experiment ------------------------------------------------------------------

    def _who(self, data: bytes) -> bytes:
        payload_of(data, Nothing)
        versions = {"coterie": __version__, "source": source.fingerprint()}
        schema = self._holdings.schema().to_json()
        return setup_message("who", Introduction(self._folder.name, schema, versions))

    def _divide(self, data: bytes) -> bytes:
        division = _division(payload_of(data, DivisionRequest))
        facts = self._holdings.facts(division, classes=self._folder.consent.counts)
        sums = sums_report(self._holdings.sums(division))
        report = DivisionReport(facts.counts, *facts.seal, facts.weak, facts.classes, sums)
        return setup_message("divide", report)

    def _squares(self, data: bytes) -> bytes:
        asked = payload_of(data, DivisionRequest)
        found = sums_report(self._holdings.squares(_division(asked), means_of_request(asked)))
        if found is None:
            raise EngineError("squares: this data is not standardised")
        return setup_message("squares", found)

    def _agree(self, data: bytes) -> bytes:
        """Check the terms of an experiment, write them down, and make the first state."""
        text = payload_of(data, Proposal).agreement
        agreement = Agreement.from_json(text)
        experiment, site = self._made(agreement)
        self._check(experiment)
        folder = site.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_text(folder / AGREEMENT, agreement.to_json() + "\n")
        self._remember(agreement.hash, (experiment, site))
        return setup_message("agree", Consent(agreement.hash, site.start()))

    def _check(self, experiment: Experiment) -> None:
        """Refuse terms that the site did not consent to, or that are not about its own data."""
        consent, traits = self._folder.consent, experiment.algorithm.traits
        if traits.sharing is not None and not consent.samples:
            raise _RefusedError(
                "refused",
                "the method sends raw samples of every site to all others, and this site's "
                "[consent] samples is false",
            )
        config, agreement = experiment.config, experiment.agreement
        data = config.data
        division = Division(agreement.schema, data.scale, data.val, data.test, config.run.seed)
        own = self._holdings.facts(division, classes=False).counts
        said = agreement.counts[agreement.clients.index(self._folder.name)]
        if own != said:
            raise _RefusedError(
                "refused", f"the agreement says {said} of this site; its data gives {own}"
            )

    # ---- the rounds ----------------------------------------------------------------------------

    def _in_round(self, head: Mapping[str, Any], data: bytes) -> bytes:
        """Train or evaluate; a message that comes again is answered as before."""
        _, site = self._experiment(str(head.get("experiment", "")))
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
            raise _RefusedError("unreadable", "an experiment is known by its sha256")
        folder = self._folder.experiments / experiment
        if not (folder / AGREEMENT).is_file():
            raise _RefusedError("not_agreed", f"no experiment {experiment[:12]} was agreed to")
        return folder

    def _experiment(self, name: str) -> tuple[Experiment, Site]:
        if name not in self._open:
            path = self._place(name) / AGREEMENT
            agreement = Agreement.from_json(path.read_text(encoding="utf-8"))
            if agreement.hash != name:
                raise StoreError(f"{path}: has changed since it was agreed to; it is not used")
            self._remember(name, self._made(agreement))
        return self._open[name]

    def _remember(self, name: str, made: tuple[Experiment, Site]) -> None:
        others = [key for key in self._open if key != name]
        for key in others[: max(0, len(others) - MOST_OPEN + 1)]:
            del self._open[key]
        self._open[name] = made

    def _made(self, agreement: Agreement) -> tuple[Experiment, Site]:
        """The site's part of an experiment: its client number, its problem, its samples."""
        if self._folder.name not in agreement.clients:
            raise _RefusedError("wrong_client", f"'{self._folder.name}' is not among the clients")
        secret = int.from_bytes(self._folder.secret()[:8], "little") >> 1
        most = self._folder.limits.message_mib * 2**20
        experiment = experiment_of(agreement, self._code, secret=secret, most_bytes=most)
        consent = self._folder.consent
        shards = _Once(partial(self._holdings.shards, experiment))
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

    def _write_down(self, head: Mapping[str, Any], reply: bytes) -> None:
        """Append one line about an answer to the log of what left the site."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": str(head.get("kind", ""))[:40],
            "experiment": str(head.get("experiment", ""))[:64],
            "round": head.get("round") if isinstance(head.get("round"), int) else None,
            "bytes": len(reply),
            "sha256": digest(reply),
        }
        with self._folder.sent.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Once:
    """A value that is computed when it is first wanted."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def _division(asked: DivisionRequest) -> Division:
    schema = Schema.from_json(asked.schema)
    if not (0 <= asked.val < 1 and 0 <= asked.test < 1):
        raise EngineError("divide: found a share outside of 0 to 1")
    return Division(schema, asked.scale, asked.val, asked.test, asked.seed)


def allowed_code(folder: SiteFolder) -> Code:
    """The places from which code may be imported: copies of the files that the site allows.

    Only files with the sha256 that ``site.toml`` names are copied; nothing else lies beside them.
    """
    place = folder.path / CODE
    shutil.rmtree(place, ignore_errors=True)
    if not folder.code:
        return Code()
    place.mkdir(mode=0o700)
    for name, sha in folder.code.items():
        path = folder.path / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"[code] '{name}': cannot be read ({error.strerror})") from error
        if digest(data) != sha:
            raise ConfigError(
                f"[code] '{name}': has the sha256 {digest(data)}; expected {sha}; look at what "
                "changed, and name the new sha256 in site.toml if you allow it"
            )
        (place / path.name).write_bytes(data)
    return Code(folders=(place.resolve(),))
