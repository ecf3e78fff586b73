"""WAFFLE: SCAFFOLD whose averages lean towards one agent, from everybody to itself.

A model is trained for a requesting agent i* (P4 calls it Alice). Agents run SCAFFOLD's client
step and send (Δy_i, Δc_i). In round r = 1 … R the server weighs them (Algorithm 1):

    d_i    = ‖Δy_i − Δy_{i*}‖;   dM, dm = largest and smallest of the others
    d_{i*} = dm (1 − (dM − dm)/dM · (1 − Ω(r)))
    a_i    = max(Ψ(r) − (d_i − d_{i*}) / (dM − min_j d_j), 0)
    a      = one-hot(i*) from r ≥ 0.95 R;   α^r = a / Σ a
    ᾱ      = (α^{r−2} + α^{r−1} + α^r) / 3
    x ← x + η_g Σ ᾱ_i Δy_i;   c ← Σ ᾱ_i c_i⁺  (``recompute``)  or  c + Σ ᾱ_i Δc_i  (``increment``)
    Ω(r) = Ψ(r) = 1 / (1 + exp(slope (r/(R/2) − 1)))                                    (Eq. 4)

Travels: (x, c) down, (Δy_i, Δc_i) up, once for every requester.

Notes:
    ``c_rule = "increment"`` is printed; it leaves a constant bias c − c_{i*} in Alice's last,
    local rounds. ``recompute`` removes it and is our default (spec 8.3).
    The raw weights before the first round are uniform. Eq. 3 divides by dM − d_{i*} and the
    algorithm by dM − min_j d_j; they agree, and we follow the algorithm. With two agents all
    weights are equal until the last 5 % of the rounds: the run warns.
    An agent that is missing or rejected is left out before distances are taken. Where the
    requester itself is missing, its model, control and weights stay as they are.
    ``screen`` is ours (off as printed): one outlier stretches dM, gets weight 0 itself and lets
    agents of the wrong concept in. Screening at 3 times the median norm costs nothing where updates
    are of like size; it drops an honest agent whose update is much longer than the others'.
    Several requesters, or ``all``, are independent copies: N times the cost of one.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Algorithm, Mixture, Round, rows
from ..client import Client
from ..errors import ConfigError
from ..mixing import mix
from ..ranges import Interval, NotNegative, Number, Positive
from ..task import Task
from ..tree import Bank
from .erosion import (
    Requesters,
    accept,
    distances_to,
    full_rows,
    lengths,
    offer,
    place_of,
    requesting,
)
from .scaffold import Change, Shared, controlled_steps


class Copies(NamedTuple):
    """The server, with a row for every requester."""

    x: Tensor  # [R, P]
    c: Tensor  # [R, P]
    previous: Tensor  # [R, K] raw weights of the last round
    before: Tensor  # [R, K] raw weights of the round before it
    weights: Tensor  # [R, K] the last smoothed weights
    controls: Tensor  # [K, R, P] everybody's c_i


class Kept(NamedTuple):
    """What an agent keeps."""

    c: Tensor  # [R, P] its control for every requester


def schedule(r: float, horizon: int, slope: float, offset: float = 0) -> float:
    """Ω and Ψ: from near 1 to near 0, 1/2 in the middle of the run.

    >>> [round(schedule(r, 100, 3.2), 3) for r in (1, 50, 100)]
    [0.958, 0.5, 0.039]
    """
    return 1 / (1 + math.exp(slope * ((r + offset) / (horizon / 2) - 1)))  # Eq. 4


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
class Waffle(Algorithm[Copies, Shared, Change, Kept]):
    """Weighted averaging for personalised federated learning.

    Fields:
        requesters: the clients (numbers from 0) that get a model of their own, or ``all``.
        slope: ΔΩ, how abruptly the weights turn from everybody to the requester.
        offset: rounds by which the schedule is ahead (or, negative, behind).
        c_rule: the server's control after a round: ``recompute`` from everybody's, or
            ``increment`` as printed.
        server_lr: the server's step η_g.
        screen: leave out agents whose update is longer than so many times the median; 0 leaves
            out none, 3 is safe.
    """

    requesters: Requesters = "all"
    slope: Annotated[float, Interval(ge=0, le=100)] = 3.2
    offset: Number = 0.0
    c_rule: Literal["recompute", "increment"] = "recompute"
    server_lr: Positive = 1.0
    screen: NotNegative = 0.0

    title: ClassVar[str] = "WAFFLE"
    paper: ClassVar[str] = (
        "Beaussart, Grimberg, Hartley, Jaggi: WAFFLE: Weighted Averaging for Personalized "
        "Federated Learning, 2021"
    )
    bibtex: ClassVar[str] = """@article{beaussart2021waffle,
  title={{WAFFLE}: Weighted Averaging for Personalized Federated Learning},
  author={Beaussart, Martin and Grimberg, Felix and Hartley, Mary-Anne and Jaggi, Martin},
  journal={arXiv:2110.06978}, year={2021}}"""

    @property
    def everybody(self) -> bool:
        """All agents take part in every round."""
        return True

    def init(self, task: Task) -> tuple[Copies, Kept]:
        """The common start, zero controls and uniform weights for every requester."""
        K, asked = task.population, len(requesting(self.requesters, task.population))
        if K == 2:
            warnings.warn(
                "waffle with two agents weighs both alike until the last 5 % of the rounds; "
                "it needs three to compare distances",
                stacklevel=2,
            )
        uniform = torch.full((asked, K), 1 / K, dtype=torch.float64, device=task.device)
        zero = rows(torch.zeros_like(task.start), asked)
        controls = rows(zero, K)
        x = rows(task.start, asked)
        return Copies(x, zero, uniform, uniform, uniform, controls), Kept(controls)

    def download(self, server: Copies, round: Round) -> Shared:
        """Every requester's model and control."""
        count = len(round.clients)
        return Shared(rows(server.x, count), rows(server.c, count))

    def local(self, client: Client, received: Shared, state: Kept) -> tuple[Change, Kept]:
        """SCAFFOLD's client step for every requester."""

        def one(x: Tensor, c: Tensor, own: Tensor) -> Change:
            y, control = controlled_steps(client, x, c - own)
            return Change(y - x, control - own)

        change = client.map(one, received.x, received.c, state.c)
        return change, Kept(state.c + change.dc)

    def aggregate(self, server: Copies, uploads: Change, round: Round) -> Copies:
        """Weigh and average, for each requester apart."""
        controls = server.controls.index_add(0, round.clients, uploads.dc)
        x, c, previous, before, weights, _ = (part.clone() for part in server)
        for k, requester in enumerate(requesting(self.requesters, round.population)):
            at = place_of(requester, round.clients)
            if at is None:
                continue
            dy, dc = uploads.dy[:, k], uploads.dc[:, k]
            last = server.previous[k]
            weights[k], previous[k] = self._weigh(dy, at, last, server.before[k], round)
            before[k] = last
            here = weights[k, round.clients]
            x[k] = server.x[k] + self.server_lr * mix(here, dy)
            if self.c_rule == "increment":
                c[k] = server.c[k] + mix(here, dc)
            else:
                c[k] = mix(here, controls[round.clients, k])
        return Copies(x, c, previous, before, weights, controls)

    def _weigh(
        self, dy: Tensor, at: int, previous: Tensor, before: Tensor, round: Round
    ) -> tuple[Tensor, Tensor]:
        """Smoothed and raw weights ``[K]``, zero for who is absent or screened out."""
        update, r = round.trainable(dy), round.index + 1
        kept = self._screened(update, at).nonzero().flatten()
        present = round.clients[kept]
        here = int((kept < at).sum())  # the requester's place among those kept
        turn = schedule(r, round.horizon, self.slope, self.offset)
        found = calc_weights(distances_to(here, update[kept]), here, turn, turn)
        raw = torch.zeros_like(previous).index_copy(0, present, found)
        requester = int(round.clients[at])
        smoothed, raw = smooth(raw, previous, before, r, round.horizon, requester)
        smoothed = torch.zeros_like(raw).index_copy(0, present, smoothed[present])
        return smoothed / smoothed.sum(), raw

    def _screened(self, update: Tensor, at: int) -> Tensor:
        """Whose update may be compared; the requester's always may."""
        norm = lengths(update)
        if not self.screen:
            return norm.isfinite()
        fine = norm <= self.screen * norm.median()
        return fine.index_fill(0, torch.tensor(at, device=fine.device), True)

    def serve(self, server: Copies, round: Round) -> Bank:
        """To every requester its model."""
        return offer(server.x, requesting(self.requesters, round.population), round.clients)

    def predictor(self, client: Client, served: Bank, state: Kept) -> Mixture:
        """The requester's model."""
        return accept(served)

    def collaboration(self, server: Copies, states: Kept, round: Round) -> Tensor:
        """The requesters' smoothed weights."""
        return full_rows(server.weights, requesting(self.requesters, round.population))

    def check(self, task: Task, rounds: int) -> None:
        """Refuse requesters that do not exist and a schedule that lies outside the run."""
        requesting(self.requesters, task.population)
        if abs(self.offset) > rounds:
            raise ConfigError(
                f"waffle.offset: found {self.offset:g} in a run of {rounds} rounds; expected a "
                f"number from {-rounds} to {rounds}"
            )
