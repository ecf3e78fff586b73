"""FedCollab: who should form a coalition is decided before training, by what clients have and lack.

With n_i the samples of client i, m all of them, β_j = n_j/m, and α_ij = β_j / Σ β of i's coalition:

    D_ij = how well a small classifier tells samples (x, y) of i from those of j, from 0 to 1
    minimise over partitions   mean_i [ C √(Σ_j α_ij² / (β_j m)) + Σ_j α_ij D_ij ]
    then, in each coalition by itself, any method: ``inside``

The search starts from coalitions of one and moves one client at a time, while the sum falls.

Travels: before training, for each other client one classifier down and up, and how often it says
"mine"; with ``divergence = "updates"`` the common start down and its change up. Then as ``inside``.
**A classifier between two clients says how their data differ.**

Notes:
    A classifier is logistic, with weights for each class, on the features of the untrained network.
    Its two clients take ``steps`` gradient steps on their own samples and the server averages both,
    in ``rounds_before`` rounds; a pair is trained in rounds in which both reply. Every
    second sample is kept out of its training, and its D is taken on these (reading B-17).
    Coalitions form in the round after these, once all clients have been heard, or after a fifth of
    the run. A pair that has not met counts as the mean of those that have.
    ``updates`` is ours and cheaper: D_ij = (1 − cos of the changes by one round of training) / 2.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import Algorithm, AnyAlgorithm, Mixture, Round, Traits, round_of, rows
from ..core.client import Client
from ..core.fields import Checked
from ..core.mixing import cosines, last_applied, nobody_yet, noted, off_diagonal, shares_within
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Count, NotNegative
from ..core.rows import Rows, updated
from ..core.tree import Bank, Parcels, Tree
from ..errors import ConfigError, did_you_mean
from .features import class_shares, entrance

UNFIT = {
    "fedcollab": "coalitions within coalitions are not formed",
    "fedala": "its messages have a shape that depends on who takes part",
}
RATE = 2.0  # of the classifiers' steps; samples have length one


class Server(NamedTuple):
    inner: Tree  # the servers of ``inside`` [coalitions, ...]; one before they form
    coalition: Tensor  # [K] each client's, -1 before they form
    start: Tensor  # [P]
    sizes: Tensor  # [K] training samples
    heard: Tensor  # [K] rounds in which a client took part before coalitions formed
    pairs: Tensor  # [K, K, q] classifiers, the same for (i, j) and (j, i); or [0, ...]
    met: Tensor  # [K, K] whether the classifier was trained by both
    mine: Tensor  # [K, K] how often the classifier says i on i's samples, i being the smaller
    moves: Rows  # [K, P] changes of the start, for ``updates``; or [0, P]
    applied: Rows  # [K, K] the weights of each client's last round


class Sent(NamedTuple):
    start: Tree  # [P] before coalitions form, then ()
    pairs: Tree  # [K, q] its classifiers before coalitions form, or ()
    inner: Tree  # of ``inside``, or ()


class Up(NamedTuple):
    pairs: Tree  # [K, q] or ()
    mine: Tree  # [K] or ()
    move: Tree  # [P] or ()
    inner: Tree


def error(coalition: Tensor, divergences: Tensor, sizes: Tensor, strength: float) -> Tensor:
    """``mean_i [ C √(Σ_j α_ij² / (β_j m)) + Σ_j α_ij D_ij ]`` of a partition ``[K]``."""
    n = sizes.to(torch.float64).clamp(min=1)  # β_j m
    A = shares_within(coalition, n)
    apart = torch.where(A > 0, A * divergences, 0.0).sum(1)
    return (strength * (A**2 / n).sum(1).sqrt() + apart).mean()


def coalitions(divergences: Tensor, sizes: Tensor, strength: float = 5.0) -> Tensor:
    """Each client's coalition ``[K]``, numbered from 0 in the order of the clients.

    >>> D = torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.9], [0.9, 0.9, 0.0]])
    >>> coalitions(D, torch.tensor([50, 50, 50]))
    tensor([0, 0, 1])
    """
    at, D = torch.arange(len(sizes), device=sizes.device), divergences.to(torch.float64)
    least, moved = error(at, D, sizes, strength), True
    while moved:
        moved = False
        for client in range(len(at)):
            alone = torch.tensor([int(at.max()) + 1], device=at.device)
            others = [at.index_fill(0, at.new_tensor(client), int(c)) for c in at.unique()]
            tried = [*others, at.index_copy(0, at.new_tensor([client]), alone)]
            found = torch.stack([error(one, D, sizes, strength) for one in tried])
            if found.min() < least - 1e-12:
                at, least, moved = tried[int(found.argmin())], found.min(), True
    first = (at[:, None] == at).to(torch.int64).argmax(1)
    numbers: Tensor = first.unique(return_inverse=True)[1]
    return numbers


@dataclass(frozen=True)
class FedCollab(Algorithm[Server, Sent, Up, Any]):
    """Coalitions before training, and any method in each of them.

    Fields:
        inside: the method that trains each coalition, with its defaults.
        strength: C, what few samples cost beside unlike ones; the larger, the larger coalitions.
        divergence: how unlike clients are is learnt by a ``discriminator`` for each pair, or seen
            from the ``updates`` of one round of training.
        rounds_before: rounds in which the discriminators are trained.
        steps: gradient steps of a client on its discriminators in such a round.
    """

    inside: str = "fedavg"
    strength: NotNegative = 5.0
    divergence: Literal["discriminator", "updates"] = "discriminator"
    rounds_before: Count = 1
    steps: Count = 20

    bibtex: ClassVar[str] = """@inproceedings{bao2023fedcollab,
  title={Optimizing the Collaboration Structure in Cross-Silo Federated Learning},
  author={Bao, Wenxuan and Wang, Haohan and Wu, Jun and He, Jingrui},
  booktitle={ICML}, year={2023}}"""
    private = Declaration(refused="discriminators of the clients' data leave them")

    def check_together(self) -> None:
        from . import ALGORITHMS  # the table has this method, too

        names = [name for name in ALGORITHMS if name not in UNFIT]
        if self.inside in UNFIT:
            raise ConfigError(
                f"fedcollab: inside = {self.inside!r} cannot train a coalition: "
                f"{UNFIT[self.inside]}; expected a method like 'fedavg'"
            )
        if self.inside not in names:
            raise ConfigError(
                f"fedcollab: inside = {self.inside!r} is no method that can train a coalition; "
                f"{did_you_mean(self.inside, names)}"
            )

    @property
    def _inner(self) -> AnyAlgorithm:
        from . import ALGORITHMS

        return ALGORITHMS[self.inside]()

    @property
    def within(self) -> tuple[Checked, ...]:
        return (self._inner,)

    @property
    def _learns(self) -> bool:
        return self.divergence == "discriminator"

    @property
    def traits(self) -> Traits:
        inner = self._inner.traits
        if not self._learns:
            return inner
        return replace(inner, discloses="discriminators")

    def optimizers(self, problem: Problem) -> int:
        return self._inner.optimizers(problem)

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        return self._inner.trace_key(index, horizon)

    def init(self, problem: Problem) -> tuple[Server, Any]:
        inner, states = self._inner.init(problem)
        K, start = problem.population, problem.start
        width = entrance(problem.model, 1, "fedcollab").width + 1 if self._learns else 0
        nobody = torch.zeros(K, dtype=torch.int64, device=problem.device)
        pairs = start.new_zeros(1).expand(K, K, max(1, problem.classes) * width)
        return Server(
            inner=tree.map_leaves(lambda leaf: leaf[None], inner),
            coalition=nobody - 1,
            start=start,
            sizes=problem.sizes,
            heard=nobody,
            pairs=pairs if self._learns else pairs[:0],
            met=torch.zeros(K, K, dtype=torch.bool, device=problem.device),
            mine=torch.zeros(K, K, dtype=problem.dtype, device=problem.device),
            moves=rows(torch.zeros_like(start), 0 if self._learns else K),
            applied=nobody_yet(start, K),
        ), states

    # ---- in coalitions -----------------------------------------------------------------------

    def _each(self, server: Server, clients: Tensor) -> list[tuple[int, Tensor]]:
        """The coalitions that some clients are in, and which of them."""
        at = server.coalition[clients].clamp(min=0)
        return [(c, (at == c).nonzero().flatten()) for c in at.unique().tolist()]

    def _stacked(self, server: Server, round: Round, stage: str) -> Tree:
        """The messages of all coalitions, one row per client of the round."""
        parts, places = [], []
        for c, place in self._each(server, round.clients):
            own = round._replace(clients=round.clients[place], sent_to=None)
            parts.append(getattr(self._inner, stage)(tree.row(server.inner, c), own))
            places.append(place)
        back = torch.cat(places).argsort()
        return tree.map_leaves(lambda leaf: leaf[back], tree.concat(parts))

    def download(self, server: Server, round: Round) -> Sent:
        """Before coalitions form, the start and the client's classifiers; then as the method."""
        if int(server.coalition.max()) >= 0:
            return Sent((), (), self._stacked(server, round, "download"))
        start = rows(server.start, len(round.clients))
        return Sent(start, server.pairs[round.clients] if self._learns else (), ())

    def local(self, client: Client, received: Sent, state: Any) -> tuple[Up, Any]:
        """Train the classifiers, or the start for its change; or as the method."""
        if isinstance(received.pairs, Tensor):
            first = torch.arange(client.population, device=client.id.device) > client.id
            pairs, mine = self._told_apart(client, received, torch.where(first, 1.0, -1.0))
            return Up(pairs, mine, (), ()), state
        if isinstance(received.start, Tensor):
            return Up((), (), client.train(received.start) - received.start, ()), state
        upload, state = self._inner.local(client, received.inner, state)
        return Up((), (), (), upload), state

    def _told_apart(self, client: Client, received: Sent, side: Tensor) -> tuple[Tensor, Tensor]:
        """The classifiers ``[K, q]`` after some steps, and how often the received ones said 1."""
        door = entrance(client.model, 1, "fedcollab")
        count = received.pairs.shape[1] // (door.width + 1)

        def samples(judging: int) -> tuple[Tensor, Tensor]:
            made, inside = [], []
            for block in client.blocks("train"):
                f = door.features(client, received.start, block)[1]
                f = torch.cat([f, torch.ones_like(f[:, :1])], 1)
                f = f / torch.linalg.vector_norm(f, dim=1, keepdim=True)
                each = class_shares(client, block, count, f.dtype)
                made.append((each[:, :, None] * f[:, None]).flatten(1))
                half = (block.position % 2 == judging).to(f.dtype)
                inside.append(half if block.mask is None else half * block.mask)
            return torch.cat(made), torch.cat(inside)

        Z, inside = samples(0)
        total, pairs, side = inside.sum().clamp(min=1), received.pairs, side.to(Z.dtype)
        for _ in range(self.steps):
            slope = side * torch.sigmoid(-side * (Z @ pairs.T)) * inside[:, None]
            pairs = pairs + RATE * (slope.T @ Z) / total
        Z, inside = samples(1)
        says = ((Z @ received.pairs.T) > 0).to(Z.dtype) * inside[:, None]
        return pairs, says.sum(0) / inside.sum().clamp(min=1)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """Collect what tells clients apart, and form coalitions; or as the method in each."""
        at = round.clients
        if int(server.coalition.max()) < 0:
            return self._formed(self._collected(server, uploads, at), round)
        servers = [tree.row(server.inner, c) for c in range(int(server.coalition.max()) + 1)]
        for c, place in self._each(server, at):
            own = round._replace(clients=at[place], sent_to=None)
            servers[c] = self._inner.aggregate(servers[c], tree.take(uploads.inner, place), own)
        A = shares_within(server.coalition[at], server.sizes[at])
        return server._replace(inner=tree.stack(servers), applied=noted(server.applied, at, A))

    def _collected(self, server: Server, uploads: Up, at: Tensor) -> Server:
        """The server with what the round's clients know of each other."""
        heard = server.heard.index_add(0, at, torch.ones_like(at))
        if not self._learns:
            return server._replace(heard=heard, moves=updated(server.moves, at, uploads.move))
        here = torch.zeros_like(server.heard, dtype=torch.bool).index_fill(0, at, True)
        both = here[:, None] & here
        new = torch.zeros_like(server.pairs).index_copy(0, at, uploads.pairs)
        pairs = torch.where(both[..., None], (new + new.transpose(0, 1)) / 2, server.pairs)
        known = server.met[at]  # an untrained classifier says nothing
        mine = torch.where(known, uploads.mine, server.mine[at])
        mine = server.mine.index_copy(0, at, mine)
        return server._replace(heard=heard, pairs=pairs, met=server.met | both, mine=mine)

    def _formed(self, server: Server, round: Round) -> Server:
        """The server with coalitions, where it is time to form them."""
        least = self.rounds_before + 1 if self._learns else 1
        waited = round.index + 1 >= max(least, round.horizon // 5)
        if not waited and int(server.heard[server.sizes > 0].min()) < least:
            return server
        found = coalitions(self.divergences(server, round), server.sizes, self.strength)
        count = int(found.max()) + 1
        inner = tree.map_leaves(lambda leaf: leaf.expand(count, *leaf.shape[1:]), server.inner)
        done = server.pairs[:0]
        return server._replace(coalition=found, inner=inner, pairs=done, moves=server.moves[:0])

    def divergences(self, server: Server, round: Round) -> Tensor:
        """D ``[K, K]``, float64, zero on the diagonal."""
        if self._learns:
            known, D = server.met, (server.mine - server.mine.T).abs().to(torch.float64)
        else:
            known = (server.heard > 0)[:, None] & (server.heard > 0)
            D = (1 - cosines(round.trainable(server.moves[:]))) / 2
        usual = off_diagonal(D)[off_diagonal(known)]
        rest = usual.mean() if len(usual) else D.new_ones(())
        return torch.where(known, D, rest).fill_diagonal_(0)

    def serve(self, server: Server, round: Round) -> Tree:
        return self._stacked(server, round, "serve")

    def predictor(self, client: Client, served: Tree, state: Any) -> Mixture:
        return self._inner.predictor(client, served, state)

    def observed(self, server: Server) -> dict[str, Any]:
        at = server.coalition.tolist()
        return {"coalition": at} if min(at) >= 0 else {}

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        """The shares of samples in the coalition, among those of each client's last round."""
        return last_applied(server.applied)

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a method inside that sends tables of models, which coalitions cannot share."""
        self._inner.check(problem, rounds)
        server, _ = self._inner.init(problem)
        whole = round_of(problem, 0, rounds, torch.arange(problem.population))
        sent = self._inner.download(server, whole), self._inner.serve(server, whole)
        if any(isinstance(leaf, Bank | Parcels) for _, leaf in tree.flatten(sent, (Bank, Parcels))):
            raise ConfigError(
                f"fedcollab: inside = {self.inside!r} sends each client a choice of models, which "
                "cannot be made in coalitions; expected a method like 'fedavg'"
            )
