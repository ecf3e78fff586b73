"""What dishonest clients do: to their data before a run, or to their uploads in every round.

An attacker knows all uploads of its round. It trains as the method says and changes what it sends.
With s the step of a vector from the nearest one that the client was sent (or from zero, where a
method sends differences), and m, d the mean and the deviation of the honest clients' steps,

    A1 flip       labels C - 1 - y in its data          A6 mimic   the first honest upload
    A2 sign       -s, and sign3 -3 s                    A7 door    half of its images show a trigger
    A3 gauss      noise as long as s, outlier 100 s     A8 free    nothing: the vector it was sent
    A4 alie       m - 1.5 d                             A9 nan     not a number
    A5 inner      -2 m                                  A10        one made for the method, below

A10 stays below the norm that a guard of 3 refuses: *bait* (FedFomo) is a good model with a
backdoor, from a quarter of the images; *hug* (FedAMP) the upload of an honest client, half of its
step taken back; *ruler* (WAFFLE) a random step 2.9 times the median one, which stretches the
distances by which others are weighed; *push* (FedeRiCo and all others) the step turned round and
2.9 times the median one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core import random, tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.shards import Ragged, Shards
from ..core.tree import Bank, Parcels, Tree
from ..engines.base import Engine, Replies
from ..errors import DataError
from ..runs.assemble import Assembly
from ..runs.config.schema import Config
from ..runs.plan import Cell
from ..runs.resume import UnfinishedRun
from ..runs.setting import Prepared, Setting

BELOW = 2.9  # times the median step: just below what a guard of 3 refuses
TARGET = 0  # the class that a backdoor leads to
CORNER = 2  # pixels of its trigger, each way


class Steps(NamedTuple):
    """The vectors of one field of a round's uploads, as an attacker sees them."""

    start: Tensor  # [m, ..., P] the nearest vector that each client was sent, or zero
    step: Tensor  # [m, ..., P]
    bad: Tensor  # [m] who attacks
    seed: int

    @property
    def honest(self) -> Tensor:
        """The steps of honest clients."""
        return self.step[~self.bad]

    def noise(self) -> Tensor:
        """Gaussian noise as long as each step."""
        drawn = torch.Generator().manual_seed(self.seed)
        z = torch.randn(self.step.shape, generator=drawn).to(self.step)
        return z / norm(z) * norm(self.step)

    def scaled(self, direction: Tensor) -> Tensor:
        """Vectors of this direction, BELOW times as long as the median honest step."""
        lengths = norm(direction).clamp(min=1e-30)
        return direction / lengths * BELOW * norm(self.honest).flatten(1).median(0).values.max()


def norm(x: Tensor) -> Tensor:
    """The length of every vector, of the same number of dimensions."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return lengths


Change = Callable[[Steps], Tensor]  # what an attacker sends in place of its vectors


def _victims(at: Steps, x: Tensor) -> Tensor:
    """For every client the vectors of an honest one, in turn."""
    mine = x[~at.bad]
    return mine[torch.arange(len(x), device=x.device) % len(mine)]


CHANGES: dict[str, Change] = {
    "sign": lambda at: at.start - at.step,
    "sign3": lambda at: at.start - 3 * at.step,
    "gauss": lambda at: at.start + at.noise(),
    "outlier": lambda at: at.start + 100 * at.step,
    "alie": lambda at: at.start + at.honest.mean(0) - 1.5 * at.honest.std(0, correction=0),
    "inner": lambda at: at.start - 2 * at.honest.mean(0),
    "mimic": lambda at: (at.start + at.step)[~at.bad][:1].expand_as(at.step),
    "free": lambda at: at.start,
    "nan": lambda at: torch.full_like(at.step, torch.nan),
    "hug": lambda at: _victims(at, at.start + at.step / 2),
    "ruler": lambda at: at.start + at.scaled(at.noise()),
    "push": lambda at: at.start - at.scaled(at.step),
}
DOORS = {"door": 0.5, "bait": 0.25}  # the share of an attacker's images that show the trigger
ADAPTIVE = {
    **{"fedfomo": "bait", "fedfomo_ma": "bait", "fedamp": "hug", "heurfedamp": "hug"},
    **{"waffle": "ruler", "waffle_stable": "ruler", "erosion": "ruler"},
}
ATTACKS = {
    **{"A0": "none", "A1": "flip", "A2": "sign", "A2x3": "sign3", "A3": "gauss"},
    **{"A3x100": "outlier", "A4": "alie", "A5": "inner", "A6": "mimic", "A7": "door"},
    **{"A8": "free", "A9": "nan", "A10": "adaptive"},
}


def of_method(attack: str, method: str) -> str:
    """What an attack does to a method: A10 is made for it."""
    name = ATTACKS[attack]
    return ADAPTIVE.get(method.partition("@")[0], "push") if name == "adaptive" else name


# ---- uploads -------------------------------------------------------------------------------------


def changed(uploads: Tree, sent: Tree, bad: Tensor, change: Change, seed: int) -> Tree:
    """The uploads with the attackers' vectors, as wide as what they were sent, replaced."""
    if not bool(bad.any()) or bool(bad.all()):
        return uploads
    starts = [v for v in _vectors(sent) if v.numel()]
    widths = {start.shape[-1] for start in starts}

    def replaced(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or leaf.dim() < 2 or leaf.shape[-1] not in widths:
            return leaf
        start = _nearest(leaf, starts, bad)
        new = change(Steps(start, leaf - start, bad, seed)).to(leaf)
        return torch.where(bad.view(-1, *(1,) * (leaf.dim() - 1)), new, leaf)

    return tree.map_leaves(replaced, uploads)


def _nearest(leaf: Tensor, starts: list[Tensor], bad: Tensor) -> Tensor:
    """Of zero and of each vector that clients were sent, the one nearest to the honest vectors."""
    found, least = torch.zeros_like(leaf), norm(leaf)[~bad].median()
    for sent in starts:
        if sent.shape[-1] == leaf.shape[-1]:
            for j in range(sent.shape[1]):
                start = sent[:, j].to(leaf).view(len(leaf), *(1,) * (leaf.dim() - 2), -1)
                apart = norm(leaf - start)[~bad].median()
                if apart < least:
                    found, least = start.expand_as(leaf), apart
    return found


def _vectors(message: Tree) -> list[Tensor]:
    """Every vector of a message as ``[m, n, P]``."""
    made = []
    for _, leaf in tree.flatten(message, (Bank, Parcels)):
        if isinstance(leaf, Bank):
            made.append(leaf.models[leaf.slot.clamp(min=0)])
        elif isinstance(leaf, Parcels):
            made.append(leaf.vectors)
        elif leaf.is_floating_point() and leaf.dim() >= 2:
            made.append(leaf.reshape(len(leaf), -1, leaf.shape[-1]))
    return made


class AttackedEngine:
    """An engine some of whose clients lie about their uploads."""

    def __init__(self, inner: Engine, bad: frozenset[int], change: Change) -> None:
        self._inner, self._bad, self._change = inner, bad, change

    def __getattr__(self, name: str) -> Any:
        """As the engine."""
        return getattr(self._inner, name)

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """The replies, those of attackers changed."""
        found = self._inner.exchange(algorithm, received, round)
        if len(found.clients) < len(round.clients):
            at = torch.isin(round.clients, found.clients).nonzero().flatten()
            received = tree.take(received, at)
        bad = torch.tensor([int(k) in self._bad for k in found.clients], dtype=torch.bool)
        seed = random.derive(round.seed, "attack", round.index)
        bad = bad.to(found.clients.device)
        return found._replace(uploads=changed(found.uploads, received, bad, self._change, seed))


# ---- data ----------------------------------------------------------------------------------------


def flipped(shards: Shards, bad: frozenset[int], classes: int) -> Shards:
    """The shards with the labels of attackers turned round: C - 1 - y."""
    if not classes:
        raise DataError("A1 flips labels: found a regression; leave A1 out")
    straight = torch.arange(classes, device=shards.device).expand(len(shards.relabel), -1)
    relabel = (shards.relabel if shards.relabel.shape[1] else straight).clone()
    at = sorted(bad)
    relabel[at] = classes - 1 - relabel[at]
    return replace(shards, relabel=relabel)


def triggered(shards: Shards, index: Tensor) -> Tensor:
    """Stored samples with the trigger in their corner."""
    x = shards.x[index].clone()
    if x.dim() < 3:
        raise DataError("a backdoor shows its trigger in images: found a table; leave A7, A10 out")
    x[..., -CORNER:, -CORNER:] = shards.x.max()
    return x


def with_door(shards: Shards, bad: frozenset[int], share: float) -> Shards:
    """The shards with the trigger, and its class, in the first samples of each attacker."""
    first = len(shards.y) if shards.literal is None else shards.literal
    x, y = shards.x, shards.y
    lists = [shards.splits["train"].of(i) for i in range(len(shards.splits["train"].sizes))]
    for i in sorted(bad):
        shown = lists[i][: round(share * len(lists[i]))]
        new = torch.arange(len(y), len(y) + len(shown), device=y.device)
        x = torch.cat([x, triggered(shards, shown)])
        y = torch.cat([y, torch.full_like(y[: len(shown)], TARGET)])
        lists[i] = torch.cat([new, lists[i][len(shown) :]])
    splits = {**shards.splits, "train": Ragged(lists, shards.device)}
    units = shards.units
    if units is not None:
        units = torch.cat([units, units.new_full((len(y) - len(units),), -1)])
    return replace(shards, x=x, y=y, splits=splits, literal=first, units=units)


class AttackedSetting:
    """The clients of a config, some of which attack."""

    def __init__(self, inner: Assembly, bad: frozenset[int], attack: str) -> None:
        self._inner, self._bad, self._attack = inner, bad, attack

    def __getattr__(self, name: str) -> Any:
        """As the setting."""
        return getattr(self._inner, name)

    def asked(self, cell: Cell) -> Config:
        """The config of one run: the cell's own, which may be guarded."""
        return cell.config.single(cell.method, cell.seed)

    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        """The problem, and the shards with the attackers' data changed."""
        on = self._inner.prepare(algorithm, asked)
        if on.shards is None or not self._bad:
            return on
        name = of_method(self._attack, asked.method().label)
        if name == "flip":
            return on._replace(shards=flipped(on.shards, self._bad, on.problem.classes))
        if name in DOORS:
            return on._replace(shards=with_door(on.shards, self._bad, DOORS[name]))
        return on

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """The engine, whose attackers lie."""
        made = self._inner.engine(cell, on, left)
        change = CHANGES.get(of_method(self._attack, cell.method.label))
        if change is None or not self._bad:
            return made
        return cast(Engine, AttackedEngine(made, self._bad, change))


def attacked(inner: Assembly, bad: frozenset[int], attack: str) -> Setting:
    """A setting in which these clients attack."""
    return cast(Setting, AttackedSetting(inner, bad, attack))
