"""A site: runs next to one client's data and answers the server's messages about one experiment.

A site keeps its last states in files that are named by their sha256. Every message says which state
it is based on, so a repeated message gets the same answer, nothing has to be committed, and a state
that was lost, rolled back or changed is a reason to refuse, never a silent new start. A client's
answers on its test samples stay at the site: only scores and paired gains leave it.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, client_digest, round_of
from ..core.answers import Answers, Outcomes
from ..core.locations import located
from ..core.paired_tests import Pair, SiteGain, site_gain
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from ..storage import files
from ..storage.files import parsed, strict
from .base import Evaluation
from .codec import Message, decode, digest, encode, is_digest, refusal, vocabulary
from .loop import LoopBackend

STATES, REPLY = "states", "reply.bin"
ANSWERS, MODEL = "answers.npz", "model.safetensors"
COLUMNS = len(Evaluation._fields)
KEPT = 4  # states: a server that resumes from its checkpoint before the last needs older ones


class Disclosure(NamedTuple):
    """What the owner of a site lets leave it, beside what the method itself sends."""

    shown: bool = True  # what the client's state shows of the collaboration
    models: bool = False  # the final model


SIMULATED = Disclosure(models=True)  # a simulation writes the models into the run's folder


class Telling(Protocol):
    """What a site tells of its final model's scores."""

    def __call__(self, exact: Sequence[float], outcomes: Outcomes) -> Sequence[float]:
        """Instead of the ``exact`` scores and losses: numbers in the order of Evaluation."""


@strict
class RoundHead:
    """What the server asks of a site in a round."""

    kind: Literal["local", "predict"]
    experiment: str
    round: int
    horizon: int
    client: int
    base: str  # sha256 of the state before the round
    metric: str = ""
    last: bool = False
    collect: bool = False


class StateFiles:
    """The last states of one client, each in a file named by its round and its sha256."""

    def __init__(self, folder: Path, *, durable: bool = True, kept: int = KEPT) -> None:
        self._folder, self._durable, self._kept = folder, durable, kept

    def read(self, sha: str) -> bytes | None:
        """The state with this sha256; None if it is not here, or no longer as it was written."""
        for path in self._folder.glob(f"*-{sha}.bin") if is_digest(sha) else ():
            data = path.read_bytes()
            if digest(data) == sha:
                return data
        return None

    def write(self, data: bytes, round: int, *, base: str | None = None) -> str:
        """Store the state after a round; states that no server can ask for again are removed."""
        sha = digest(data)
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{round:08d}-{sha}.bin"
        if self._durable:
            with files.whole(path) as temporary:
                temporary.write_bytes(data)
        else:
            path.write_bytes(data)
        if base is not None:
            self._prune(round, {sha, base})
        return sha

    def _prune(self, round: int, wanted: set[str | None]) -> None:
        """Remove old states, and those of later rounds: the server has gone back to this one."""
        stored = sorted(self._folder.glob("*-*.bin"))
        now = [path for path in stored if int(path.stem.partition("-")[0]) <= round]
        for path in {*stored} - {*now} | {*now[1 : -self._kept]}:  # the first: before round 0
            if path.stem.partition("-")[2] not in wanted:
                path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class Site:
    """One client of one experiment; its folder holds its states and its last answers."""

    folder: Path
    client: int
    problem: Problem
    algorithm: AnyAlgorithm
    shards: Callable[[], Shards]
    discloses: Disclosure = SIMULATED
    durable: bool = True  # whether states survive a power cut
    kept: int = KEPT  # states
    telling: Telling | None = None  # of the last round's scores, and of no others; None: all, exact

    @property
    def states(self) -> StateFiles:
        return StateFiles(self.folder / STATES, durable=self.durable, kept=self.kept)

    def start(self) -> str:
        """Store the client's state before round 0, and return its sha256."""
        rows = self.algorithm.init(self.problem)[1]
        row = tree.row(tree.take(rows, torch.tensor([self.client])), 0)
        return self.states.write(encode(Message({}, row)), 0)

    def answer(self, data: bytes, *, again: bool = False) -> bytes:
        """The reply to a message of the server; one that comes ``again`` replaces nothing."""
        types = vocabulary(self.algorithm)
        message = decode(data, types)
        head = parsed(json.dumps(dict(message.head)), RoundHead, "message")
        if head.client != self.client:
            return refusal("wrong_client")
        stored = self.states.read(head.base)
        if stored is None:
            return refusal("stale_state")
        answer = self._local if head.kind == "local" else self._predict
        with located(self.algorithm, self.problem.model.module):
            base = None if again else head.base
            return answer(head, _one_row(message.body), _one_row(decode(stored, types).body), base)

    def repeated(self, data: bytes) -> bytes | None:
        """The reply to the same message as last time, if it is stored; None otherwise."""
        path, key = self.folder / REPLY, digest(data).encode()
        stored = path.read_bytes() if path.is_file() else b""
        return stored[len(key) :] if stored.startswith(key) else None

    def remember(self, data: bytes, reply: bytes) -> None:
        """Store the reply to a message, in case the message comes again."""
        with files.whole(self.folder / REPLY) as temporary:
            temporary.write_bytes(digest(data).encode() + reply)

    def _local(self, asked: RoundHead, received: Tree, state: Tree, base: str | None) -> bytes:
        """Compute one round: the new state stays here, the upload is sent."""
        (backend, round), began = self._at(asked), time.perf_counter()
        upload, new = backend.local(self.algorithm, received, state, round)
        row = tree.row(new, 0)
        after = encode(Message({}, row))
        head = {
            "round": round.index,
            "client": self.client,
            "state": self.states.write(after, round.index + 1, base=base),
            "seconds": time.perf_counter() - began,
        }
        shown = self.algorithm.shown(row) if self.discloses.shown else ()
        return encode(Message(head, (tree.row(upload, 0), shown)))

    def _predict(self, asked: RoundHead, served: Tree, state: Tree, base: str | None) -> bytes:
        """Evaluate the client's predictor; in the last round the predictor is kept here."""
        (backend, round), last = self._at(asked), asked.last
        told: dict[str, Any] = {"round": round.index, "client": self.client}
        if self.telling is not None and not last:
            none = Mixture(torch.zeros(1), torch.zeros(1, 0, dtype=self.problem.dtype))
            return encode(Message(told, (torch.full((COLUMNS,), math.nan).double(), none)))
        found = backend.predict(self.algorithm, served, state, round, asked.metric, keep=last)
        columns: Sequence[float] = [float(column[0]) for column in found.evaluation]
        predictor: Mixture = tree.row(found.mixture, 0)
        has_model = (predictor.weights != 0).any()
        if last:
            if base is not None:  # else it was kept when the message came first
                self.keep(predictor, found.outcomes, columns[0] if has_model else math.nan)
            told["digest"] = client_digest(predictor)
        if self.telling is not None:
            exact, columns = columns, [math.nan] * COLUMNS
            if has_model and found.outcomes is not None:
                columns = self.telling(exact, found.outcomes)
        scores = torch.tensor(columns, dtype=torch.float64)
        if not (self.discloses.models and last and asked.collect):
            # weights would say whose models it uses
            predictor = Mixture(has_model[None].to(scores), predictor.models[:1, :0])
        return encode(Message(told, (scores, predictor)))

    def keep(self, predictor: Mixture, outcomes: Outcomes | None, score: float) -> None:
        """Store the final predictor, and its answers for :func:`judged`."""
        with files.whole(self.folder / MODEL) as temporary:
            save_file({k: v.clone() for k, v in predictor._asdict().items()}, temporary)
        if outcomes is not None:
            with files.whole(self.folder / ANSWERS) as temporary, temporary.open("wb") as file:
                known = {k: v for k, v in outcomes._asdict().items() if v is not None}
                np.savez(file, score=score, **known)

    def _at(self, asked: RoundHead) -> tuple[LoopBackend, Round]:
        backend = LoopBackend(self.problem, self.shards())
        clients = torch.tensor([self.client], device=self.problem.device)
        return backend, round_of(self.problem, asked.round, asked.horizon, clients)


def judged(metric: str, pairs: Sequence[tuple[Path, Path]]) -> SiteGain:
    """The gain of a method over Local at this site, from the answers of finished runs.

    There is one pair of folders (of the method's run, of Local's) per seed. A seed without a score
    of both is left out.
    """
    return site_gain(metric, [_pair(*folders) for folders in pairs])


def _pair(ours: Path, local: Path) -> Pair | None:
    (a, ours_score), (b, local_score) = stored_answers(ours), stored_answers(local)
    return None if math.isnan(ours_score) or math.isnan(local_score) else (a, b)


def stored_answers(folder: Path) -> tuple[Answers, float]:
    """The answers of a finished run, and the score; NaN if the client had none."""
    try:
        with np.load(folder / ANSWERS, allow_pickle=False) as stored:
            parts = {name: stored[name] for name in Outcomes._fields if name in stored}
            (found,) = Outcomes(**parts).clients()
            return found, float(stored["score"])
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{folder}: holds no answers of a finished run ({error})") from error


def _one_row(part: Tree) -> Tree:
    """A tree of one client with a leading dimension of one row."""
    return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), part)
