"""Differential privacy of a client's gradients: what is agreed, what a method declares, one client.

With ``[privacy]`` every gradient that a client takes in training is

    g̃ = (Σ_i m_i g_i min(1, C / ‖g_i‖) + σ C z) / B

over its samples i, where m_i is 1 with probability q = B / n, independently (Poisson samples), g_i
is the gradient of sample i alone and z is standard normal. B is the expected size of a minibatch,
never its own. A penalty that does not depend on data is added after that.

Every minibatch is drawn anew for every pass over the data and for every model. In a simulation the
draws are derived from the public seed, so that its ε is what a federation would spend and protects
nobody; a site draws from its own secret, from the agreement and its data, and from all that it was
sent: a question that is asked twice gets the same answer, and any other gets other noise.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..errors import EngineError
from . import random, tree
from .per_sample import clipped_sum
from .ranges import Interval, NotNegative, Positive

if TYPE_CHECKING:
    from .batches import Batch, Loss, SplitName
    from .client import Client
    from .optim import Recipe
    from .problem import Problem

Penalty = Callable[[Tensor], Tensor]
Delta = Annotated[float, Interval(gt=0, lt=1)]


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of the clients' training samples (docs/privacy.md).

    Fields:
        noise: the noise multiplier σ; 0 clips only.
        clip: the largest L2 norm C of one sample's gradient.
        delta: the δ at which ε is told.
        epsilon: in place of noise: the ε that no client exceeds in the whole run.
    """

    noise: NotNegative | None = None
    clip: Positive = 1.0
    delta: Delta = 1e-5
    epsilon: Positive | None = None


# ---- what a method declares ----------------------------------------------------------------------


class Query(NamedTuple):
    """Some of the gradients that a client takes in a round."""

    epochs: int | None = None  # passes over its samples; None: as the recipe says
    times: int = 1  # trainings of this kind; each draws minibatches of its own
    gradients: int = 1  # gradients of the same minibatch
    half: int = 0  # on the first (1) or the second (2) half of its samples (Client.halves)

    def steps(self, recipe: "Recipe", size: int) -> tuple[float, int]:
        """The share q of the samples in a minibatch, and the number of minibatches."""
        if self.half:
            recipe, size = recipe.halved(), (size + 2 - self.half) // 2
        recipe = recipe if self.epochs is None else recipe.passing(self.epochs)
        return min(1.0, recipe.batch / max(size, 1)), self.times * recipe.count(size)


class When(NamedTuple):
    """The round that a method declares its queries for."""

    index: int  # type: ignore[assignment]
    horizon: int
    population: int


TRAIN = (Query(),)
Queries = tuple[Query, ...]


@dataclass(frozen=True)
class Declaration:
    """What a method declares of one round of a client, so that it can be made private.

    Fields:
        queries: its gradients, or a function of the method and the round.
        leaves: what leaves the client, or enters what leaves, without noise.
        refused: why it cannot be made private, or a function of the method; empty if it can.
    """

    queries: Queries | Callable[[Any, When], Queries] = TRAIN
    leaves: str = "the number of samples"
    refused: str | Callable[[Any], str] = ""

    def of(self, method: Any, when: When) -> Queries:
        return self.queries(method, when) if callable(self.queries) else self.queries

    def refusal(self, method: Any) -> str:
        return self.refused(method) if callable(self.refused) else self.refused


# ---- one client in one round ---------------------------------------------------------------------

OVERFLOW = 1e-6  # chance that a simulated minibatch has more samples than there is room for


@lru_cache
def room(batch: int) -> int:
    """The most samples of a simulated minibatch of ``batch`` expected samples.

    >>> room(10), room(50)
    (28, 87)
    """
    from scipy.stats import poisson

    return int(poisson.isf(OVERFLOW, batch))


DrawnFor = tuple[Tensor, Tensor, int]  # a client's stream, size and batch
_NONE = torch.zeros(0)


@dataclass(eq=False)
class Mechanism:
    """The draws and the gradients of one client in one round; its copies share it."""

    privacy: Privacy
    secret: bytes | None
    models: tuple[Tensor, ...] = ()  # which of several models that are trained side by side
    scan: int = 0  # number of the pass over minibatches
    call: int = 0  # number of the gradient within a step
    pairs: Tensor = _NONE  # the numbers of the pairs of a gradient's entries
    table: tuple[Tensor, int, Tensor | None] = (_NONE, -1, None)  # the samples of a pass

    def beside(
        self, f: Callable[..., tree.Tree], rows: tuple[Tensor, ...]
    ) -> tuple[Callable[..., tree.Tree], tuple[Tensor, ...]]:
        """``f`` for one of several models, whose number is a first argument, and their numbers."""
        scan, call = self.scan, self.call

        def one(number: Tensor, *parts: Tensor) -> tree.Tree:
            before, self.models = self.models, (*self.models, number)
            self.scan, self.call = scan, call  # for every model the same, as under vmap
            try:
                return f(*parts)
            finally:
                self.models = before

        return one, (torch.arange(len(rows[0]), device=rows[0].device), *rows)

    def prepare(self, drawn_for: DrawnFor, steps: int, parameters: int) -> None:
        """Compute what the steps of a pass read: a traced step must not make it."""
        device = drawn_for[0].device
        self.pairs = torch.arange((parameters + 1) // 2, device=device)
        numbers = torch.arange(steps, device=device)[:, None]
        table = None if self.secret else self._poisson(drawn_for, numbers)
        self.table = (drawn_for[0], self.scan, table)

    def places(self, drawn_for: DrawnFor, number: int | Tensor) -> Tensor:
        """A Poisson sample of a client's positions; those from its size on are padding.

        A simulation has :func:`room` for the sample, and leaves out what exceeds it; a site takes
        all of it.
        """
        stream, scan, table = self.table
        if table is not None and stream is drawn_for[0] and scan == self.scan:
            within = torch.arange(table.shape[1], device=table.device)
            return table.view(-1)[number * table.shape[1] + within]
        place = self._poisson(drawn_for, number)
        return place[: max(1, int((place < drawn_for[1]).sum()))] if self.secret else place

    def _poisson(self, drawn_for: DrawnFor, number: int | Tensor) -> Tensor:
        """The samples of some minibatches: gaps between independent choices are geometric."""
        stream, size, batch = drawn_for
        places = torch.arange(int(size) + 1 if self.secret else room(batch), device=stream.device)
        size = size.clamp(min=1)
        q = (batch / size.to(torch.float64)).clamp(max=1)
        draws = random.uniform, random.secret_uniform, len(places)
        luck = self._drawn(*draws, "poisson", stream, number, places)
        gaps = (torch.log1p(-luck) / torch.log1p(-q)).floor() + 1
        return (gaps.cumsum(-1) - 1).clamp(max=size).to(torch.int64)

    def gradient(
        self,
        client: "Client",
        w: Tensor,
        batch: "Batch | SplitName",
        stream: Tensor,
        loss: "Loss | None",
        penalty: Penalty | None,
    ) -> Tensor:
        """g̃ of a minibatch, and the gradient of a penalty."""
        if isinstance(batch, str) or batch.step is None:
            raise EngineError(
                "privacy: this method takes a gradient that is not of a minibatch of training, "
                "which would leave the client without noise; use another setting of the method, "
                "or no [privacy]"
            )
        clip, sigma = self.privacy.clip, self.privacy.noise or 0.0
        if loss is None and client.model.taps is not None:
            total = clipped_sum(client, w, batch, clip)
        else:
            total = _explicit(client, w, batch, loss or client.loss, clip)
        if sigma:
            half = (len(w) + 1) // 2
            pairs = self.pairs if len(self.pairs) == half else torch.arange(half, device=w.device)
            draws = random.normal_pairs, random.secret_normal, len(w)
            z = self._drawn(*draws, f"noise {self.call}", stream, batch.step, pairs)
            total = total + sigma * clip * z[: len(w)].to(total)
        self.call += 1
        g = total / client.size.clamp(min=1, max=client.recipe.batch)
        return g if penalty is None else g + grad(penalty)(w)

    def _drawn(
        self,
        public: Callable[..., Tensor],
        secret: Callable[..., Tensor],
        count: int,
        purpose: str,
        stream: Tensor,
        number: int | Tensor,
        places: Tensor,
    ) -> Tensor:
        words = (stream, purpose, self.scan, *self.models, number)
        if self.secret is None:
            return public(*words, places)
        named = (word if isinstance(word, str) else int(word) for word in words)
        return secret(self.secret, count, *named).to(stream.device)


def _explicit(client: "Client", w: Tensor, batch: "Batch", loss: "Loss", clip: float) -> Tensor:
    """``Σ m_i g_i min(1, C / ‖g_i‖)`` of any loss, from the gradient of every sample alone."""

    def one(x: Tensor, y: Tensor, position: Tensor) -> Tensor:
        alone = batch._replace(x=x[None], y=y[None], mask=None, position=position[None])
        return grad(loss)(w, alone)  # type: ignore[no-any-return]

    parts = batch.x, batch.y, batch.position
    if client.model.recurrent:  # vmap knows no recurrent layer
        g = torch.stack([one(*part) for part in zip(*parts, strict=True)])
    else:
        g = vmap(one)(*parts)
    length = torch.linalg.vector_norm(g, dim=1)
    share = (clip / length.clamp(min=clip)).to(g)
    total: Tensor = (share if batch.mask is None else share * batch.mask) @ g
    return total


def mechanism_of(problem: "Problem", *asked: tree.Tree) -> Mechanism | None:
    """One client's draws for one question ``asked`` of it; None where nothing is private.

    A site that is asked something else draws other noise, and the same where it is asked again.
    """
    if problem.privacy is None or problem.secret is None:
        return None if problem.privacy is None else Mechanism(problem.privacy, None)
    total = hashlib.blake2b(key=problem.secret, digest_size=32)
    for leaf in tree.leaves(asked):
        array = leaf.detach().cpu().contiguous().numpy()
        total.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return Mechanism(problem.privacy, total.digest())
