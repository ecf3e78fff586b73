"""What a site does with a coordinator's messages, by its own rules, whatever brings the messages.

A site reads only what the federation's operator has signed, tells nothing of its data before its
owner has approved the request (:mod:`coterie.deploy.approval`), and answers an experiment's rounds
in order. It trusts nobody with code: code that a config names is refused before anything is
imported, unless it is one of the files that the site itself allows, unchanged. Its data is what its
own ``site.toml`` says. Every answer is written to the log ``sent.jsonl`` before it leaves.
"""

import contextlib
import functools
import hmac
import json
import logging
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..core.answers import Outcomes
from ..core.imports import Code
from ..core.metrics import METRICS
from ..core.shards import Shards
from ..data.data_schema import Schema
from ..engines.codec import digest, is_digest, read_head, refusal, refused_by
from ..engines.site import Disclosure, RoundHead, Site, judged
from ..errors import ConfigError, CoterieError, EngineError, StoreError, printable
from ..runs import environment
from ..runs.config.schema import Config
from ..storage import files
from ..storage.files import parsed
from .approval import (
    APPROVALS,
    MIB,
    REQUESTS,
    Approval,
    Approvals,
    Asked,
    ForbiddenError,
    RoundGate,
)
from .division import FOLDER, ChangedError
from .holdings import Holdings
from .peer_part import serverless
from .peer_site import PeerSite, PeerStep
from .protocol import (
    Approved,
    Ask,
    Consent,
    Description,
    DivisionReport,
    DivisionRequest,
    Introduction,
    JudgeRequest,
    Nothing,
    Proposal,
    payload_of,
    setup_message,
    unsigned,
)
from .scores import ToldScores, validation_rows
from .site_folder import SiteFolder
from .terms import Agreement, Experiment, Request, experiment_of, refuse_sharing

AGREEMENT = "agreement.json"
CODE = "code"  # in a site's folder: copies of the files that its owner allows a config to name
WITHDRAWN = "withdrawn.json"  # in a site's folder, once it has left the federation
BEFORE_APPROVAL = MIB  # bytes of a message
MOST_OPEN = 4  # experiments that are kept in memory
MOST_PAIRS = 1000  # seeds of a comparison
MOST_SAID = 500  # characters of a sentence in the log

WHAT = {  # what an answer of a round holds
    "local": "what the method sends",
    "predict": "scores and losses",
    "peer": "messages for other sites, sealed",
}

_LOG = logging.getLogger(__name__)


class Open(NamedTuple):
    """An experiment in memory."""

    experiment: Experiment
    site: Site
    gate: RoundGate
    peer: PeerSite | None  # where models are sealed between sites


class SiteHandler:
    """Answers the coordinator for one site; messages have to be signed by the operator."""

    def __init__(self, folder: SiteFolder, holdings: Holdings) -> None:
        self._folder, self._holdings = folder, holdings
        self._approvals = Approvals(folder)
        self._scores = ToldScores.of(folder)
        self._open: dict[str, Open] = {}
        self._code = allowed_code(folder)
        self._told: tuple[str, ...] = ()  # what the answer that is being made holds
        self._agreed = ""  # the experiment that it agrees to

    def largest(self) -> int:
        """Bytes of the largest message that may arrive now: few before there was an approval."""
        most = self._folder.limits.message_mib * MIB
        return most if self._approvals.known() else min(most, BEFORE_APPROVAL)

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; a refusal, never an exception, if the message is not accepted.

        Sentences about the site's data stay in the site's own log: they may quote a cell.
        """
        folder = self._folder
        body = unsigned(data, folder.operator, folder.federation, folder.name)
        if body is None:  # nothing is told, and nothing logged by which strangers fill a disk
            return refusal("unsigned", "expected a message signed by the operator")
        if (held := kept(folder.path)) > folder.limits.disk_mib * MIB:
            return refusal(  # which is not logged: the log is among what fills the disk
                "policy",
                f"this site keeps {held // MIB:,} MiB, more than [limits] disk_mib allows; its "
                "owner has to remove finished experiments, or to allow more",
            )
        self._told, self._agreed, head = (), "", dict(read_head(body))
        try:
            reply = self._answered(head, body)
        except ConfigError as error:
            _LOG.warning("refused: %s", printable(str(error)))
            reason = error.reason if isinstance(error, ForbiddenError) else "refused"
            reply = refusal(reason, str(error))
        except ChangedError as error:
            _LOG.warning("refused: %s", printable(str(error)))
            reply = refusal("policy", "too few of the site's rows have changed; its log says more")
        except Exception as error:  # whatever a message brings about
            *_, last = traceback.extract_tb(error.__traceback__)
            where = "" if isinstance(error, CoterieError) else f" ({last.filename}:{last.lineno})"
            said = printable(str(error))[:MOST_SAID]
            _LOG.error("failed: %s: %s%s", type(error).__name__, said, where)
            _LOG.debug("failed", exc_info=error)
            reply = refusal("refused", f"failed ({type(error).__name__}); the site's log says why")
        self._write_down(head, reply)
        return reply

    def _write_down(self, head: Mapping[str, Any], reply: bytes) -> None:
        """Append a line to the log of what left; a refusal holds its reason."""
        refused = refused_by(reply)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": _short(head.get("kind"), 40),
            "experiment": _short(head.get("experiment", self._agreed), 64),
            "round": round if isinstance(round := head.get("round"), int) else None,
            "told": [*self._told] if refused is None else [f"refused: {refused[0]}"],
            "bytes": len(reply),
            "sha256": digest(reply),
        }
        with self._folder.sent.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _answered(self, head: Mapping[str, Any], data: bytes) -> bytes:
        if (self._folder.path / WITHDRAWN).exists():
            raise ForbiddenError("withdrawn", "this site has left the federation")
        kind = head.get("kind")
        answers: dict[Any, Callable[[bytes], bytes]] = {
            "who": self._who,
            "ask": self._ask,
            "describe": self._describe,
            "divide": self._divide,
            "agree": self._agree,
            "judge": self._judge,
            "local": partial(self._in_round, head),
            "predict": partial(self._in_round, head),
            "peer": partial(self._peer, head),
        }
        if not isinstance(kind, str) or kind not in answers:
            raise ForbiddenError("unreadable", "a site knows no message of this kind")
        return answers[kind](data)

    # ---- before an experiment ------------------------------------------------------------------

    def _who(self, data: bytes) -> bytes:
        payload_of(data, Nothing)
        self._told = ("the site's name", "the number of its columns of each kind")
        return setup_message("who", Introduction.of(self._folder.name, self._holdings.schema))

    def _ask(self, data: bytes) -> bytes:
        request = Request.from_json(payload_of(data, Ask).request)
        self._approvals.ask(request)
        return setup_message("ask", Approved(request.id))

    def _describe(self, data: bytes) -> bytes:
        approval = self._approvals.approved(payload_of(data, Approved).request)
        approval.refuse_texts(self._holdings.unnamed_texts())
        versions = {"coterie": __version__, "source": environment.fingerprint()}
        schema = self._holdings.schema
        told = {column.name: column.levels for column in schema.columns}
        told |= {f"target {schema.target.name}": schema.target.classes}
        self._told = tuple(
            f"{name}: {', '.join(texts) or 'numbers'}" for name, texts in told.items()
        )
        found = Description(schema.to_json(), versions, self._folder.consent.scores)
        return setup_message("describe", found)

    def _asked_schema(self, asked: DivisionRequest) -> tuple[Approval, Schema]:
        """The approved request that a message is a part of, and the common schema."""
        approval = self._approvals.approved(asked.request)
        approval.refuse_fold(asked.fold)
        approval.refuse_texts(self._holdings.unnamed_texts())
        return approval, Schema.from_json(asked.schema)

    def _divide(self, data: bytes) -> bytes:
        asked = payload_of(data, DivisionRequest)
        approval, schema = self._asked_schema(asked)
        whole = asked.fold is None  # differences of two folds would be about a few rows
        facts = self._holdings.facts(schema, asked.scale, asked.fold)
        sums = self._holdings.sums(schema, asked.scale, approval) if whole else None
        told = whole and self._folder.consent.counts
        classes = self._holdings.classes(schema, asked.scale) if told else ()
        counts = facts.counts
        self._told = (
            f"rows: {counts.train} train, {counts.val} val, {counts.test} test",
            "keyed hashes of the data and its division",
            *((f"samples of each class: {classes}",) if classes else ()),
            *(() if sums is None else (f"sums{' under masks' * sums.masked}", *sums.told)),
        )
        numbers, masked = (None, False) if sums is None else (sums.numbers, sums.masked)
        report = DivisionReport(counts, *facts.seal, facts.weak, classes, numbers, masked)
        return setup_message("divide", report)

    def _agree(self, data: bytes) -> bytes:
        """Check the terms of an experiment, write them down, and make the first state."""
        agreement = Agreement.from_json(payload_of(data, Proposal).agreement)
        approval = self._approvals.approved(agreement.request)
        made = self._made(agreement)
        self._check(made.experiment)
        self._approvals.agree(approval, made.experiment, made.experiment.problem.model.whole)
        folder = made.site.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_text(folder / AGREEMENT, agreement.to_json() + "\n")
        self._remember(agreement.hash, made)
        self._told, self._agreed = ("the hash of its first state",), agreement.hash
        start = made.site.start() if made.peer is None else made.peer.start()
        return setup_message("agree", Consent(agreement.hash, start))

    def _check(self, experiment: Experiment) -> None:
        """Refuse terms that the site did not consent to, or that are not about its own data."""
        consent, traits = self._folder.consent, experiment.algorithm.traits
        refuse_sharing(experiment.algorithm)
        if traits.discloses and not getattr(consent, traits.discloses):
            raise ForbiddenError(
                "refused",
                f"the method sends more of a site's data than models, and this site's [consent] "
                f"{traits.discloses} is false",
            )
        agreement, scale = experiment.agreement, experiment.config.data.scale
        if not (consent.scores or agreement.sealed):
            self._check_metric(experiment)
        fold = experiment.config.fold(experiment.problem.seed)
        own = self._holdings.facts(agreement.schema, scale, fold).counts
        said = agreement.counts[agreement.clients.index(self._folder.name)]
        if own != said:
            raise ForbiddenError(
                "refused", f"the agreement says {said} of this site; its data gives {own}"
            )

    def _check_metric(self, experiment: Experiment) -> None:
        """Refuse an experiment whose scores cannot leave."""
        metric = experiment.config.run.metric
        told = [name for name, one in METRICS.items() if one.one_row is not None]
        if metric not in told or (
            METRICS[metric].targets == "numbers" and not _deviation(experiment)
        ):
            raise ForbiddenError(
                "refused",
                f"a single row may decide a score of '{metric}', and this site's [consent] scores "
                f"is false; expected one of {', '.join(told)}",
            )
        self._scores.refuse_spent(experiment.agreement.hash)

    # ---- the rounds ----------------------------------------------------------------------------

    def _in_round(self, head: Mapping[str, Any], data: bytes) -> bytes:
        """Train or evaluate."""
        asked = parsed(json.dumps(dict(head)), RoundHead, "message")
        opened = self.experiment(asked.experiment)
        metric = opened.experiment.config.run.metric
        if opened.peer is not None:
            raise ForbiddenError("not_approved", "agreed was that sites seal their models")
        if asked.kind == "predict" and asked.metric != metric:
            raise ForbiddenError("policy", f"expected the agreed metric, {metric}")
        return self._once(opened, asked, data, opened.site.answer)

    def _peer(self, head: Mapping[str, Any], data: bytes) -> bytes:
        """One step of a round among peers."""
        asked = parsed(json.dumps(dict(head)), PeerStep, "message")
        opened = self.experiment(asked.experiment)
        if opened.peer is None:
            raise ForbiddenError("not_approved", "agreed was an experiment without peers")
        return self._once(opened, asked, data, partial(opened.peer.answer, asked=asked))

    def _once(self, opened: Open, asked: Asked, data: bytes, answer: Callable[..., bytes]) -> bytes:
        """The answer to a message of a round; one that comes again is answered as before."""
        experiment, site, gate, peer = opened
        self._approvals.approved(experiment.agreement.request)
        sha = digest(data)
        gate.check(asked, sha)
        self._told = (WHAT[asked.kind],)
        if isinstance(asked, RoundHead) and asked.kind == "predict" and site.telling is not None:
            self._told = ("scores of the final model, with noise",) if asked.last else ("nothing",)
        before = site.repeated(data) if peer is None else None  # a step is computed anew
        if before is not None:
            return before
        again = gate.seen(asked, sha)
        reply = answer(data, again=again)
        if refused_by(reply) is None and not again:
            gate.note(asked, sha, len(reply))
            if peer is None:
                site.remember(data, reply)
        return reply

    def _judge(self, data: bytes) -> bytes:
        asked = payload_of(data, JudgeRequest)
        if asked.metric not in METRICS or not 1 <= len(asked.pairs) <= MOST_PAIRS:
            raise EngineError("judge: found an unknown metric, or no or too many pairs of runs")
        runs = [[self._finished(name, asked.metric) for name in pair] for pair in asked.pairs]
        pairs = [(ours.site.folder, local.site.folder) for ours, local in runs]
        consent, deviation = self._folder.consent.scores, _deviation(runs[0][0].experiment)
        found = (
            judged(asked.metric, pairs)
            if consent
            else self._scores.gain(asked.metric, pairs, deviation)
        )
        self._told = (
            f"gain over training alone, of each of {len(pairs)} trainings and of all: variance, "
            "interval, p-value, degrees of freedom, and "
            + ("counts of wins, losses and rows" if consent else "count of rows, with noise"),
        )
        return setup_message("judge", found.to_json())

    def _finished(self, name: str, metric: str) -> Open:
        """An experiment whose approval holds and whose metric this is."""
        found = self.experiment(name)
        experiment = found.experiment
        self._approvals.approved(experiment.agreement.request)
        if experiment.config.run.metric != metric:
            raise ForbiddenError("policy", f"expected the agreed {experiment.config.run.metric}")
        return found

    # ---- experiments -----------------------------------------------------------------------------

    def _place(self, experiment: str) -> Path:
        """The folder of an experiment that was agreed to."""
        if not is_digest(experiment):
            raise ForbiddenError("unreadable", "an experiment is known by its sha256")
        folder = self._folder.experiments / experiment
        if not (folder / AGREEMENT).is_file():
            raise ForbiddenError("not_agreed", f"no experiment {experiment[:12]} was agreed to")
        return folder

    def experiment(self, name: str) -> Open:
        """An experiment that was agreed to, by its hash, and the site's part of it."""
        if name not in self._open:
            path = self._place(name) / AGREEMENT
            agreement = Agreement.from_json(path.read_text(encoding="utf-8"))
            if agreement.hash != name:
                raise StoreError(f"{path}: has changed since it was agreed to; it is not used")
            self._remember(name, self._made(agreement))
        return self._open[name]

    def _remember(self, name: str, made: Open) -> None:
        self._open.pop(name, None)
        self._open[name] = made  # the newest is the last
        for key in [*self._open][:-MOST_OPEN]:
            del self._open[key]

    def _made(self, agreement: Agreement) -> Open:
        """The site's part of an experiment: its client number, its problem, its samples."""
        folder = self._folder
        if folder.name not in agreement.clients:
            raise ForbiddenError("wrong_client", f"'{folder.name}' is not among the clients")
        most = folder.limits.message_mib * MIB
        secret = partial(self._secret, agreement)
        experiment = experiment_of(agreement, self._code, secret=secret, most_bytes=most)
        consent, place = folder.consent, folder.experiments / agreement.hash
        shards = functools.cache(partial(self._holdings.shards, experiment))
        site = Site(
            place,
            agreement.clients.index(folder.name),
            experiment.problem,
            experiment.algorithm,
            shards,
            Disclosure(shown=consent.shown, models=consent.models),
            kept=agreement.kept,
            telling=None if consent.scores else partial(self._tell, experiment, shards),
        )
        private = experiment.problem.privacy is not None
        rounds = experiment.config.run.rounds
        gate = RoundGate(place, rounds, folder.policy.sent_mib, private=private)
        peer = None
        if agreement.sealed:
            serverless(experiment.algorithm)
            secrets = self._holdings.shared_secrets(agreement.clients)
            peer = PeerSite(site, secrets, agreement.hash, experiment.config.run.metric)
        return Open(experiment, site, gate, peer)

    def _tell(
        self,
        experiment: Experiment,
        shards: Callable[[], Shards],
        exact: Sequence[float],
        outcomes: Outcomes,
    ) -> list[float]:
        """The scores of a final model as they leave."""
        (answers,), agreement = outcomes.clients(), experiment.agreement
        val = exact[1], *validation_rows(shards(), agreement.clients.index(self._folder.name))
        metric, deviation = experiment.config.run.metric, _deviation(experiment)
        return self._scores.score(agreement.hash, metric, answers, val, deviation)

    def _secret(self, agreement: Agreement, config: Config) -> bytes:
        """What the noise of an experiment is drawn from.

        Two answers of which the same noise was added to different numbers tell their difference
        exactly. So other terms, other data, another division and other code have other noise.
        """
        scale, fold = config.data.scale, config.fold(config.run.seed)
        seal = self._holdings.facts(agreement.schema, scale, fold).seal
        bound = json.dumps([agreement.hash, *seal, self._folder.code]).encode()
        return hmac.digest(self._folder.secret(), bound, "sha256")


def _deviation(experiment: Experiment) -> float:
    """The standard deviation of the target over all sites; 0 where nothing is standardised."""
    moments = experiment.agreement.moments
    return 0.0 if moments is None else moments.target_std


def kept(site: Path) -> int:
    """Bytes that a site keeps for the federation; its own data, which may lie beside, is none."""
    places = [site / name for name in ("experiments", REQUESTS, APPROVALS, FOLDER)]
    found = 0
    for path in (site / "sent.jsonl", *(each for place in places for each in place.rglob("*"))):
        with contextlib.suppress(OSError):  # its owner may remove it meanwhile
            found += path.lstat().st_size
    return found


def _short(value: Any, most: int) -> str:
    """A text of a message; what is no text is not written out, however deep it is."""
    return value[:most] if isinstance(value, str) else ""


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
