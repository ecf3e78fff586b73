"""Runs each client as a site of its own: all that it reads or sends is bytes, its states are files.

It is the engine of a federation (:mod:`coterie.engines.remote`) with its sites in this process, and
proves that no method depends on shared memory or on another client's data. Because the clients'
files are its own, it can also read and write their states.
"""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.answers import outcomes_of
from ..core.calls import Form
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from .base import Enrolment, Predicted
from .codec import Message, Types, decode, encode, vocabulary
from .remote import RemoteEngine, SiteState, held_states
from .site import STATES, Site, stored_answers


class WireEngine:
    """Runs every client behind a boundary of bytes; their files are in a temporary folder."""

    forms: tuple[Form, ...] = ()  # every call is executed as it is written

    def __init__(self, shards: Shards, *, threads: int | None = None) -> None:
        self._shards, self._sites = shards, _Sites()
        self.home = Path(tempfile.mkdtemp(prefix="coterie-sites-"))
        label = {"engine": "wire", "threads": threads or torch.get_num_threads()}
        self._remote = RemoteEngine(self._sites, label=label, experiment="", collect=True)
        # between the first states and the last, this is the engine of a federation
        self.exchange, self.commit = self._remote.exchange, self._remote.commit
        self.shown = self._remote.shown
        self._types: Types = {}

    @property
    def choice(self) -> dict[str, Any]:
        return self._remote.choice

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        self._types, self._sites.named = vocabulary(algorithm), {}
        first = algorithm.init(problem)[1] if states is None else states
        hashes, shown, elsewhere = [], [], copy.copy(problem)  # as it travels, without its factory
        for client, name in enumerate(problem.clients):
            folder = self.home / f"client-{client:06d}"
            folder.mkdir(exist_ok=True)
            shards = partial(self._shards.of, client)
            site = Site(folder, client, elsewhere, algorithm, shards, durable=False)
            row = tree.row(tree.take(first, torch.tensor([client])), 0)
            hashes.append(site.states.write(encode(Message({}, row)), 0))
            shown.append(algorithm.shown(row))
            self._sites.named[name] = site
        return self._remote.begin(problem, algorithm, held_states(hashes, tree.stack(shown)))

    def evaluate(
        self, algorithm: AnyAlgorithm, served: Tree, round: Round, metric: str, keep: bool = False
    ) -> Predicted:
        """As in a federation; the answers that the sites keep are read from their files."""
        found = self._remote.evaluate(algorithm, served, round, metric, keep=keep)
        if not keep:
            return found
        folders = [site.folder for site in self._sites.named.values()]
        told = [stored_answers(folders[client])[0] for client in round.clients.tolist()]
        return found._replace(outcomes=outcomes_of(told))

    def snapshot(self) -> Tree:
        rows = []
        for site, sha in zip(self._sites.named.values(), self._remote.hashes, strict=True):
            data = site.states.read(sha)
            if data is None:
                raise EngineError(f"client {site.client} lost its state: {STATES} holds no {sha}")
            rows.append(decode(data, self._types).body)
        return tree.stack(rows)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


class _Sites:
    """The transport to the sites of this process."""

    def __init__(self) -> None:
        self.named: dict[str, Site] = {}

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        return {name: self.named[name].answer(data) for name, data in requests.items()}

    def sites(self) -> dict[str, SiteState]:
        return {name: SiteState(True, 0.0) for name in self.named}

    def close(self) -> None:
        """Do nothing: the engine removes the sites."""
