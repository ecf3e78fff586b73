"""What a site's owner lets happen: the policy of ``site.toml``, requests, and approvals by hand.

    requests/ID.json    what a coordinator asked for and nobody has approved yet
    approvals/ID.json   what was approved, when, by whom, and which texts may leave

An approval ends after some days. Every message of an experiment is checked against the agreement,
and the agreement against the approved request: its rounds come in order, none beyond its end, and
one that comes a second time in another form is counted.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..data.partition import Fold
from ..engines.codec import is_digest
from ..engines.site import RoundHead
from ..errors import ConfigError, StoreError, did_you_mean
from ..storage import files
from ..storage.files import parsed, strict
from .documents import PolicyTable
from .peer_site import PeerStep
from .site_folder import SiteFolder
from .terms import Agreement, Experiment, Request, most_passes

REQUESTS, APPROVALS, ASKED = "requests", "approvals", "asked.jsonl"
MOST_REQUESTS = 100  # that wait for the owner
MOST_APPROVED = 1000  # of which the owner need not know
RETURNS = 20  # beside one for each round: messages that a resumed run may send in another form
MIB = 2**20
Texts = Mapping[str, Mapping[str, int]]  # by column: the rows of each text


class ForbiddenError(ConfigError):
    """A message that the site's own rules forbid; the text is told to the coordinator."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


@strict
class Approval:
    """A request that was approved."""

    request: Request
    by_hand: bool
    since: str
    until: str
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # that may leave, by column

    def refuse_ended(self) -> None:
        """Refuse whatever is asked after the approval has ended."""
        if datetime.now(UTC) > datetime.fromisoformat(self.until):
            raise ForbiddenError(
                "ended", f"the approval of this request ended on {self.until[:10]}"
            )

    def refuse_fold(self, fold: Fold | None) -> None:
        """Refuse to test by a fold that is none of the request's."""
        if fold is not None and (fold.of != self.request.folds or not 0 <= fold.part < fold.of):
            raise ForbiddenError("not_approved", "the fold is none of the approved request")

    def refuse_texts(self, found: Texts) -> None:
        """Refuse to name a text that the owner has not seen."""
        new = [name for name, texts in found.items() if {*texts} - {*self.texts.get(name, ())}]
        if new:
            columns = ", ".join(f"'{name}'" for name in new)
            raise ForbiddenError(
                "not_approved",
                f"the owner has not approved all texts of {columns}: coterie site approve "
                f"{self.request.id[:12]}, or [levels] in site.toml",
            )


class Approvals:
    """The requests and approvals of one site."""

    def __init__(self, folder: SiteFolder) -> None:
        self._folder, self._policy = folder, folder.policy

    def ask(self, request: Request) -> Approval:
        """The approval of a request; refused if there is none, or beyond the policy."""
        refuse_beyond(self._folder, request)
        path = self._approved(request.id)
        if path.exists():
            found = self.approved(request.id)
        elif {*request.methods} <= {*self._policy.automatic} or "*" in self._policy.automatic:
            if len(self.known()) >= MOST_APPROVED:
                raise ForbiddenError(
                    "policy",
                    f"{MOST_APPROVED} requests are approved already; the owner has to approve this "
                    "one by hand, or to remove ended ones from approvals/",
                )
            return self._approve(request, {}, by_hand=False)
        else:
            self._keep(request)
            raise ForbiddenError(
                "not_approved",
                f"the request {request.id[:12]} waits for the owner of '{self._folder.name}' "
                "('coterie site requests', 'coterie site approve')",
            )
        return found

    def approve(self, begins: str, texts: Texts) -> Approval:
        """Approve by hand the request whose id begins so; ``texts`` may leave."""
        found = [one for one in (*self.waiting(), *self.known()) if one.id.startswith(begins)]
        if len({one.id for one in found}) != 1:
            known = [one.id[:12] for one in self.waiting()]
            raise ConfigError(f"ID: '{begins}' is no request; {did_you_mean(begins, known)}")
        refuse_beyond(self._folder, found[0])
        approval = self._approve(found[0], texts, by_hand=True)
        (self._folder.path / REQUESTS / f"{found[0].id}.json").unlink(missing_ok=True)
        return approval

    def waiting(self) -> list[Request]:
        """The requests that nobody has approved yet."""
        return [
            Request.from_json(path.read_text(encoding="utf-8"))
            for path in sorted((self._folder.path / REQUESTS).glob("[0-9a-f]*.json"))
        ]

    def known(self) -> list[Request]:
        """The requests that were approved, ended ones as well."""
        paths = sorted((self._folder.path / APPROVALS).glob("[0-9a-f]*.json"))
        return [_read(path).request for path in paths]

    def approved(self, name: str) -> Approval:
        """The approval of a request by its id; refused if it has none, or no longer."""
        path = self._approved(name)
        if not is_digest(name) or not path.is_file():
            raise ForbiddenError("not_approved", f"no request {name[:12]} was approved")
        found = _read(path)
        if found.request.id != name:
            raise StoreError(f"{path}: has changed since it was approved; it is not used")
        found.refuse_ended()
        refuse_beyond(self._folder, found.request)  # the policy may have become stricter
        return found

    def agree(self, approval: Approval, experiment: Experiment, size: int) -> None:
        """Refuse an agreement that is not within the request, or one too many."""
        agreement, config, request = experiment.agreement, experiment.config, approval.request
        approval.refuse_fold(config.fold(config.run.seed))
        own = agreement.counts[agreement.clients.index(self._folder.name)].train
        train = config.train
        passes = train.epochs if train.steps is None else train.steps * train.batch / max(own, 1)
        for what, asked, most in (
            ("rounds", config.run.rounds, request.rounds),
            ("epochs", max(passes, most_passes(experiment.algorithm)), request.epochs),
            ("parameters", size, self._policy.parameters),
            ("experiments", self._others(approval, agreement) + 1, self._policy.experiments),
        ):
            if asked > most:
                raise _beyond(what, asked, most)
        said = (agreement.clients, agreement.sealed)
        if config.method().name not in request.methods or said != (request.clients, request.sealed):
            raise ForbiddenError(
                "not_approved",
                "the agreement has another method, other sites or other seals than the request",
            )

    def _others(self, approval: Approval, agreement: Agreement) -> int:
        """The other experiments that were agreed under this approval, or under any automatic one.

        Automatic approvals share one number: else each new request would bring its own.
        """
        now = datetime.now(UTC).timestamp()
        since = datetime.fromisoformat(approval.since).timestamp()
        requests = {approval.request.id}
        if not approval.by_hand:
            since = now - 86400 * self._policy.days
            paths = (self._folder.path / APPROVALS).glob("[0-9a-f]*.json")
            requests = {one.request.id for one in map(_read, paths) if not one.by_hand}
        return sum(
            path.parent.name != agreement.hash
            and path.stat().st_mtime >= since
            and json.loads(path.read_bytes()).get("request") in requests
            for path in self._folder.experiments.glob("*/agreement.json")
        )

    def _approve(self, request: Request, texts: Texts, *, by_hand: bool) -> Approval:
        now = datetime.now(UTC)
        until = now + timedelta(days=self._policy.days)
        named = {name: tuple(each) for name, each in texts.items()}
        made = Approval(request, by_hand, now.isoformat(), until.isoformat(), named)
        path = self._approved(request.id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        files.write_text(path, json.dumps(asdict(made)) + "\n")
        return made

    def _keep(self, request: Request) -> None:
        place = self._folder.path / REQUESTS
        place.mkdir(mode=0o700, exist_ok=True)
        if len([*place.iterdir()]) >= MOST_REQUESTS:
            raise ForbiddenError("policy", f"{MOST_REQUESTS} requests wait for the owner already")
        files.write_text(place / f"{request.id}.json", request.to_json())

    def _approved(self, name: str) -> Path:
        return self._folder.path / APPROVALS / f"{name[:64]}.json"


def _read(path: Path) -> Approval:
    return parsed(path.read_text(encoding="utf-8"), Approval, str(path))


def refuse_beyond(folder: SiteFolder, request: Request) -> None:
    """Refuse a request that asks for more than the site's policy allows."""
    policy: PolicyTable = folder.policy
    others = [name for name in request.clients if name != folder.name]
    if len(others) != len(request.clients) - 1 or request.federation != folder.federation:
        raise ForbiddenError("policy", f"'{folder.name}' is not one of the request's clients")
    if len(others) < policy.partners:
        raise ForbiddenError(
            "policy", f"found {len(others)} other sites; expected at least {policy.partners}"
        )
    if policy.only and (strange := {*others} - {*policy.only}):
        raise ForbiddenError(
            "policy", f"'{min(strange)}' is not among the sites that may take part"
        )
    for what, asked, most in (
        ("rounds", request.rounds, policy.rounds),
        ("epochs", request.epochs, policy.epochs),
    ):
        if asked > most:
            raise _beyond(what, asked, most)


def _beyond(what: str, asked: float, most: float) -> ForbiddenError:
    return ForbiddenError("policy", f"{what}: found {asked:,.10g}; expected at most {most:,}")


Asked = RoundHead | PeerStep


def _kind(asked: Asked) -> str:
    return f"peer {asked.step}" if isinstance(asked, PeerStep) else asked.kind


def _last(asked: Asked) -> bool:
    return isinstance(asked, RoundHead) and asked.last


class RoundGate:
    """Which messages of one experiment are answered, and how often; kept in the site's folder.

    Of a ``private`` training each round is answered in one form: another one would cost an ε that
    nobody counts.
    """

    def __init__(self, folder: Path, rounds: int, most_mib: int, *, private: bool = False) -> None:
        self._path, self._rounds, self._most = folder / ASKED, rounds, most_mib * MIB
        self._private = private
        self._seen: dict[tuple[str, int], set[str]] = {}
        self._newest: dict[str, int] = {}
        self._returns = self._bytes = 0
        self._ended = False
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        whole, _, torn = text.rpartition("\n")  # what was not written to its end was not answered
        for line in whole.splitlines():
            self._note(*json.loads(line))
        if torn:
            files.write_text(self._path, f"{whole}\n" if whole else "")

    def seen(self, asked: Asked, sha: str) -> bool:
        """Whether this message was answered before."""
        return sha in self._seen.get((_kind(asked), asked.round), ())

    def check(self, asked: Asked, sha: str) -> None:
        """Refuse a message of no round of the agreement, out of order, or after the end."""
        kind, round, last = _kind(asked), asked.round, _last(asked)
        first, end = (1, self._rounds) if kind == "predict" else (0, self._rounds - 1)
        if asked.horizon != self._rounds:
            raise ForbiddenError("wrong_round", f"expected a round of the agreed {self._rounds}")
        if not first <= round <= end + (asked.kind == "peer") or (last and round != self._rounds):
            raise ForbiddenError(
                "wrong_round", f"found round {round:,}; the agreement has {self._rounds}"
            )
        if self.seen(asked, sha):
            return
        if self._ended:
            raise ForbiddenError("ended", "the experiment has ended at this site")
        if self._bytes > self._most:
            raise _beyond("bytes that left", self._bytes, self._most)
        most = 0 if self._private and kind == "local" else self._rounds + RETURNS
        if round <= self._newest.get(kind, -1) and self._returns >= most:
            raise ForbiddenError("wrong_round", f"round {round} comes again in another form")

    def note(self, asked: Asked, sha: str, size: int) -> None:
        """Note a message that was answered, before its answer leaves."""
        line = (_kind(asked), asked.round, sha, size, _last(asked))
        self._note(*line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _note(self, kind: str, round: int, sha: str, size: int, last: bool) -> None:
        seen = self._seen.setdefault((kind, round), set())
        newest = self._newest.get(kind, -1)
        self._returns += round <= newest and sha not in seen
        seen.add(sha)
        self._newest[kind] = max(newest, round)
        self._bytes += size
        self._ended |= last
