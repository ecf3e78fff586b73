"""Decentralised FedeRiCo among sites: the operator says whose turn it is and sees no model.

Sites seal models and changes of models for each other, with the box keys that their owners
exchanged (``[partners]`` in ``site.toml``); the operator passes them on. A round has four steps,
and every site of the round has to answer one before the next begins:

    want     each site says to every other one whether it wants its model
    model    it sends its model to those that want it
    train    it sends each owner of a model that it wanted its weighted change of it
    close    it adds the changes of its own model, and tells the sha256 of its new state

After the last round ``want`` and ``model`` come once more, then ``predict``: each site keeps its
predictor and its score for itself. A round begins again when a site fails in it; a site that fails
twice is left out, as if it had not been drawn, while more than half of the round's sites are there.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ..core.messages import REASONS
from ..engines.codec import Message, decode, encode, refused_by
from ..engines.remote import PASSING, Transport
from ..errors import ConfigError, EngineError
from ..runs.config.schema import Config, GuardTable
from ..runs.plan import Plan
from ..storage import files
from ..storage.files import parsed, strict
from ..training.rounds import participants
from .federated import Federated, federation_of
from .peer_part import serverless
from .peer_site import PeerStep

PROGRESS = "peers.json"  # in the folder of a run
TRIES = 2  # attempts with the same sites before those that failed are left out
PAUSE = 5.0  # seconds before a round begins again for which too few sites are there
ROUND, END = ("want", "model", "train", "close"), ("want", "model", "predict")
Sealed = Mapping[str, Mapping[str, Tensor]]  # by receiver and sender


@strict
class PeerProgress:
    """What the operator knows of a run: enough to continue it."""

    nonce: str
    states: dict[str, str]  # the sha256 of each site's state
    rounds: tuple[tuple[str, ...], ...] = ()  # the sites of each round that is over
    ended: bool = False


def run_among_peers(
    config: Config, out: Path, note: Callable[[str], None], transport: Transport | None = None
) -> PeerProgress:
    """Run the experiment of a config, or continue it in the same folder."""
    serverless(config.method().build())
    if config.guard != GuardTable():
        raise ConfigError("guard: every site checks what arrives by the default one; leave it out")
    out.mkdir(parents=True, exist_ok=True)
    path, before = out / PROGRESS, None
    if path.exists():
        before = parsed(path.read_text(encoding="utf-8"), PeerProgress, str(path))
    with contextlib.closing(federation_of(config, transport, sealed=True)) as setting:
        return _Run(setting, path, note).run(before)


class _Run:
    def __init__(self, setting: Federated, path: Path, note: Callable[[str], None]) -> None:
        self._setting, self._path, self._note = setting, path, note
        self._cell = Plan.single(setting.config, None).cells[0]
        self._algorithm = self._cell.method.build()
        self._problem = setting.prepare(self._algorithm, self._cell.config).problem

    def run(self, before: PeerProgress | None) -> PeerProgress:
        self._experiment, nonce, consents = self._setting.agreed(
            self._cell, None if before is None else before.nonce
        )
        starts = {name: consent.state for name, consent in consents.items()}
        now = before or PeerProgress(nonce, starts)
        self._save(now)
        for round in range(len(now.rounds), self._cell.config.run.rounds):
            names, states = self._played(round, ROUND, now)
            now = replace(now, states=now.states | states, rounds=(*now.rounds, names))
            self._save(now)
        if not now.ended:
            self._played(len(now.rounds), END, now)
            now = replace(now, ended=True)
            self._save(now)
        return now

    def _save(self, now: PeerProgress) -> None:
        files.write_json(self._path, asdict(now))

    def _drawn(self, round: int) -> tuple[str, ...]:
        """The sites that are drawn for a round; all of them after the last one."""
        run, clients = self._cell.config.run, self._problem.clients
        if round == run.rounds:
            return clients
        drawn = participants(self._algorithm, self._problem, round, run.participation)
        return tuple(clients[number] for number in drawn.tolist())

    def _played(
        self, round: int, steps: Iterable[str], now: PeerProgress
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """The sites that took part in a round until its end, and their new states."""
        drawn = self._drawn(round)
        names, tries = drawn, 0
        while True:
            failed, states = self._attempt(round, steps, names, now.states)
            if not failed:
                return names, states
            if len(failed) == len(names) and not {*failed.values()} & {*PASSING, "stale_state"}:
                raise EngineError(
                    f"round {round}: every site refuses ({', '.join(sorted({*failed.values()}))}), "
                    "so that waiting would change nothing; look at the sites' logs"
                )
            self._note(f"round {round}: {'; '.join(f'{n}: {why}' for n, why in failed.items())}")
            tries += 1
            left = tuple(name for name in names if name not in failed)
            if tries % TRIES:
                continue
            if round and 2 * len(left) > len(drawn):
                names = left
            else:
                self._note(f"round {round} waits for more of {', '.join(drawn)}")
                time.sleep(PAUSE)
                names = drawn

    def _attempt(
        self, round: int, steps: Iterable[str], names: tuple[str, ...], states: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Which sites failed in an attempt of a round, and why; else the sites' new states."""
        found: dict[str, str] = {}
        sealed: Sealed = {}
        for step in steps:
            requests = {
                name: self._request(step, round, names, states[name], sealed.get(name, {}), name)
                for name in names
            }
            answers = self._setting.transport.ask(requests, round)
            read = {name: _read(answers.get(name, "lost"), names, name) for name in names}
            failed = {name: why for name, why in read.items() if isinstance(why, str)}
            told = {name: one for name, one in read.items() if not isinstance(one, str)}
            failed |= _at_fault({name: one[2] for name, one in told.items()}, len(names) - 1)
            if failed:
                return failed, {}
            sealed = {to: {name: told[name][0][to] for name in names if name != to} for to in names}
            found = {name: one[1] for name, one in told.items()}
        return {}, found

    def _request(
        self,
        step: str,
        round: int,
        names: tuple[str, ...],
        base: str,
        sealed: Mapping[str, Tensor],
        to: str,
    ) -> bytes:
        rounds, none = self._cell.config.run.rounds, torch.zeros(0, dtype=torch.uint8)
        asked = PeerStep("peer", step, self._experiment, round, rounds, names, base)
        body = tuple(sealed.get(name, none) for name in names if name != to)
        return encode(Message(asdict(asked), body))


def _at_fault(missing: Mapping[str, Sequence[str]], others: int) -> dict[str, str]:
    """Whose fault it is that a site cannot open what others sealed, and why.

    A site that more than half of the others accuse; else the one that accuses, so that one site
    cannot have all others left out.
    """
    accused = Counter(sender for senders in missing.values() for sender in senders)
    guilty = {sender for sender, count in accused.items() if 2 * count > others}
    found = dict.fromkeys(guilty, "what it sealed cannot be opened")
    return found | {
        name: f"cannot open what {', '.join(senders)} sealed"
        for name, senders in missing.items()
        if {*senders} - guilty
    }


def _read(
    data: bytes | str, names: tuple[str, ...], sender: str
) -> tuple[dict[str, Tensor], str, tuple[str, ...]] | str:
    """A site's messages by receiver, its state, the senders it cannot open; or what is wrong."""
    if isinstance(data, str):
        return data if data in REASONS else "lost"
    if (refused := refused_by(data)) is not None:
        return refused[0]
    try:
        head, body = decode(data, {})
        others = [name for name in names if name != sender]
        missing = [name for name in head.get("missing", ()) if name in others]
        state = str(head.get("state", ""))
        if not missing and len(body) == 0:
            bytes.fromhex(state[:64] if len(state) == 64 else "none")
            return dict.fromkeys(others, torch.zeros(0, dtype=torch.uint8)), state, ()
        if not missing and (
            len(body) != len(others)
            or any(part.dtype != torch.uint8 or part.dim() != 1 for part in body)
        ):
            return "fields"
    except Exception:  # whatever a stranger's answer brings about
        return "unreadable"
    return dict(zip(others, body, strict=not missing)), state, tuple(missing)
