"""WAFFLE: SCAFFOLD for one agent, with weights that move from all agents to that agent alone.

A model is trained for a requesting agent i* (P4 calls it Alice). Agents run SCAFFOLD's client
step and send (Δy_i, Δc_i). In round r = 1 … R the server weighs them (Algorithm 1):

    d_i    = ‖Δy_i − Δy_{i*}‖  (``update``)  or  ‖c_i⁺ − c_{i*}⁺‖  (``gradient``)
    dM, dm = largest and smallest of the others
    d_{i*} = dm (1 − (dM − dm)/dM · (1 − Ω(r)))
    a_i    = max(Ψ(r) − (d_i − d_{i*}) / (dM − min_j d_j), 0)
    a      = one-hot(i*) from r ≥ 0.95 R;   α^r = a / Σ a
    ᾱ      = (α^{r−2} + α^{r−1} + α^r) / 3
    x ← x + η_g Σ ᾱ_i Δy_i;   c ← c + Σ ᾱ_i Δc_i
    Ω(r) = Ψ(r) = 1 / (1 + exp(slope (r/(R/2) − 1)))                                    (Eq. 4)

Travels: (x, c) down; (Δy_i, Δc_i, whether they are valid) up, once for every requester.

Notes:
    P4's Algorithm 1 compares the updates Δy_i, its text gradients, such as the mean gradient c_i⁺
    of the round's steps (reading P4-1). ``waffle_stable`` is our version of the method.
    Several requesters are independent copies; one upload has an agent's work for all of them. Where
    one copy became NaN or infinite, the agent sets its control for that requester to zero and sends
    zeros and ``valid = False``; the server leaves it out for that requester. Where it is the
    requester itself, its model stays and c starts again at zero.
    The raw weights before the first round are uniform. With two agents all weights are equal until
    the last 5 % of the rounds, and the run warns (P4-5). A missing or rejected agent is left out
    before distances are taken; a missing requester's model and weights do not change.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows
from ..core.client import Client
from ..core.mixing import mix
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Interval
from ..core.tree import Bank, Tree
from .erosion import (
    Requesters,
    accept,
    distances_to,
    full_rows,
    is_finite,
    lengths,
    offer,
    place_of,
    requesting,
)
from .fedavg import ServerLr
from .scaffold import Shared, controlled_steps


class Copies(NamedTuple):
    """The server, with one row per requester."""

    x: Tensor  # [R, P]
    c: Tensor  # [R, P]
    previous: Tensor  # [R, K] raw weights of the last round
    before: Tensor  # [R, K] raw weights of the round before it
    weights: Tensor  # [R, K] the last smoothed weights
    controls: Tensor  # [K, R, P] the c_i of every agent


class Work(NamedTuple):
    """What an agent sends, with one row per requester."""

    dy: Tensor  # [R, P]
    dc: Tensor  # [R, P]
    valid: Tensor  # [R] bool; where it is false, dy is 0 and dc resets the control to 0


class Kept(NamedTuple):
    c: Tensor  # [R, P] the agent's control for every requester


def schedule(r: float, horizon: int, slope: float) -> float:
    """The schedules Ω and Ψ: from near 1 to near 0, with 1/2 in the middle of the run.

    >>> [round(schedule(r, 100, 3.2), 3) for r in (1, 50, 100)]
    [0.958, 0.5, 0.039]
    """
    turn = slope * (r / (horizon / 2) - 1)
    return 1 / (1 + math.exp(min(turn, 700.0)))  # Eq. 4; never 0, which would leave no weight


def calc_weights(distances: Tensor, requester: int, omega: float, psi: float) -> Tensor:
    """Algorithm 1, lines 3–6 and 9: raw weights of the agents, summing to one.

    >>> calc_weights(torch.tensor([0.0, 1.0, 1.2, 2.0, 3.0]), 0, 0.5, 0.5)
    tensor([0.4430, 0.3165, 0.2405, 0.0000, 0.0000])
    """
    me = torch.arange(len(distances), device=distances.device) == requester
    if len(distances) == 1:
        return torch.ones_like(distances)
    farthest, nearest = distances[~me].max(), distances[~me].min()
    shrink = (farthest - nearest) / torch.where(farthest > 0, farthest, 1.0) * (1 - omega)
    own = nearest * (1 - shrink)  # line 4
    d = torch.where(me, own, distances)
    span = farthest - d.min()
    alike = span < 1e-12 * farthest.clamp(min=1)  # always so for two agents
    ratio = torch.where(alike, 0.0, (d - own) / torch.where(alike, 1.0, span))
    a = (psi - ratio).clamp(min=0)  # line 6
    return a / a.sum()  # line 9


def smooth(
    raw: Tensor, previous: Tensor, before_previous: Tensor, r: int, horizon: int, requester: int
) -> tuple[Tensor, Tensor]:
    """Lines 7–8 and 10: the requester alone from r ≥ 0.95 R; then the mean of three raw vectors."""
    if 20 * r >= 19 * horizon:
        raw = torch.zeros_like(raw).index_fill(0, torch.tensor(requester, device=raw.device), 1)
    return (before_previous + previous + raw) / 3, raw  # line 10


@dataclass(frozen=True)
class Waffle(Algorithm[Copies, Shared, Work, Kept]):
    """Weighted averaging for personalised federated learning.

    Fields:
        requesters: the clients (numbers from 0) that get a model of their own, or ``all``.
        slope: ΔΩ, how abruptly the weights move from all agents to the requester.
        distance: vectors compared: the agents' ``update`` Δy_i or their mean ``gradient`` c_i⁺.
    """

    requesters: Requesters = "all"
    slope: Annotated[float, Interval(ge=0, le=100)] = 3.2
    server_lr: ServerLr = 1.0
    distance: Literal["update", "gradient"] = "update"

    title: ClassVar[str] = "WAFFLE"
    bibtex: ClassVar[str] = """@article{beaussart2021waffle,
  title={{WAFFLE}: Weighted Averaging for Personalized Federated Learning},
  author={Beaussart, Martin and Grimberg, Felix and Hartley, Mary-Anne and Jaggi, Martin},
  journal={arXiv:2110.06978}, year={2021}}"""
    private = Declaration(
        lambda self, when: (Query(times=len(requesting(self.requesters, when.population))),),
        "whether an update was finite",
    )

    @property
    def traits(self) -> Traits:
        return Traits(everybody=True, several_models=True)

    def optimizers(self, problem: Problem) -> int:
        return len(requesting(self.requesters, problem.population))  # of every requester's model

    def init(self, problem: Problem) -> tuple[Copies, Kept]:
        """The common start, zero controls and uniform weights for every requester."""
        K, asked = problem.population, len(requesting(self.requesters, problem.population))
        if K == 2:
            warnings.warn(
                "waffle with two agents weighs both alike until the last 5 % of the rounds; "
                "it needs three to compare distances",
                stacklevel=2,
            )
        uniform = torch.full((asked, K), 1 / K, dtype=torch.float64, device=problem.device)
        zero = rows(torch.zeros_like(problem.start), asked)
        controls = rows(zero, K)
        kept, x = Kept(controls), rows(problem.start, asked)
        return Copies(x, zero, uniform, uniform, uniform, controls), kept

    def download(self, server: Copies, round: Round) -> Shared:
        count = len(round.clients)
        return Shared(rows(server.x, count), rows(server.c, count))

    def local(self, client: Client, received: Shared, state: Kept) -> tuple[Work, Kept]:
        def one(x: Tensor, c: Tensor, own: Tensor) -> Work:
            y, control = controlled_steps(client, x, c - own)
            dy, dc = y - x, control - own
            valid = is_finite(dy, dc)
            return Work(torch.where(valid, dy, 0.0), torch.where(valid, dc, -own), valid)

        work = client.map(one, received.x, received.c, state.c)
        return work, Kept(state.c + work.dc)

    def aggregate(self, server: Copies, uploads: Work, round: Round) -> Copies:
        controls = server.controls.index_add(0, round.clients, uploads.dc)
        asked = enumerate(requesting(self.requesters, round.population))
        copies = [self._renewed(server, k, me, uploads, controls, round) for k, me in asked]
        x, c, previous, before, weights = map(torch.stack, zip(*copies, strict=True))
        return Copies(x, c, previous, before, weights, controls)

    def _renewed(
        self, server: Copies, k: int, requester: int, uploads: Work, controls: Tensor, round: Round
    ) -> tuple[Tensor, ...]:
        """One requester's new x, c, raw weights of the last two rounds, and smoothed weights."""
        valid = uploads.valid[:, k]
        here = round._replace(clients=round.clients[valid])
        x, c, previous, before, weights = (part[k] for part in server[:5])
        at = place_of(requester, here.clients)
        if at is None:
            diverged = place_of(requester, round.clients) is not None
            return x, torch.zeros_like(c) if diverged else c, previous, before, weights
        dy, control = uploads.dy[valid, k], controls[here.clients, k]
        weights, raw = self._weigh(dy, control, at, previous, before, here)
        shares = weights[here.clients]
        c = self._control(c, shares, uploads.dc[valid, k], control)
        return x + self.server_lr * mix(shares, dy), c, raw, previous, weights

    def _control(self, c: Tensor, shares: Tensor, dc: Tensor, control: Tensor) -> Tensor:
        """The server's control, from the agents' changes and their controls after the round."""
        return c + mix(shares, dc)

    def _weigh(
        self, dy: Tensor, control: Tensor, at: int, previous: Tensor, before: Tensor, round: Round
    ) -> tuple[Tensor, Tensor]:
        """Smoothed and raw weights ``[K]``, zero for agents that are absent or screened out."""
        r, R = round.index + 1, round.horizon
        compared = round.trainable(control if self.distance == "gradient" else dy)
        fine = self._counts(round.trainable(dy), at) & self._counts(compared, at)
        kept = fine.nonzero().flatten()
        present, me = round.clients[kept], int((kept < at).sum())  # me: index among those kept
        turn = schedule(r, R, self.slope)  # Ω and Ψ
        found = calc_weights(distances_to(me, compared[kept]), me, turn, turn)
        raw = torch.zeros_like(previous).index_copy(0, present, found)
        smoothed, raw = smooth(raw, previous, before, r, R, int(round.clients[at]))
        smoothed = torch.zeros_like(raw).index_copy(0, present, smoothed[present])
        return smoothed / smoothed.sum(), raw

    def _counts(self, vectors: Tensor, at: int) -> Tensor:
        """Which agents' vectors can be compared; ``at`` is the requester."""
        return lengths(vectors).isfinite()

    def serve(self, server: Copies, round: Round) -> Bank:
        return offer(server.x, requesting(self.requesters, round.population), round.clients)

    def predictor(self, client: Client, served: Bank, state: Kept) -> Mixture:
        return accept(served)

    def collaboration(self, server: Copies, shown: Tree, round: Round) -> Tensor:
        return full_rows(server.weights, requesting(self.requesters, round.population))

    def check(self, problem: Problem, rounds: int) -> None:
        requesting(self.requesters, problem.population)
