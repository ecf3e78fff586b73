"""PaFL: FedAvg whose clients train with a loss that prepares the model for its personalisation.

In round t a client that received G minimises

    μ(t) · CE(C) + (1 − μ(t)) · D(t)(C, G)

with G frozen and D a personalisation loss; a schedule gives μ and D for each round. The paper's two
schedules train as FedAvg until T/2 and by an adaptation loss alone from then on (μ = 0, D = the
loss of ``adapt``):

    H_KD    D = distillation from G           H_EWC    D = CE + (λ/2) Σ_k M_k (C_k − G_k)²

Travels: as FedAvg. While D is EWC also the Fisher diagonal M: down with ``server_aux`` and
``aggregate``, up with ``aggregate``. With ``checkpoint`` one loss up. While D is distillation two
losses up, before and after training: where training raises the loss, the run raises an alarm.

Notes:
    The adaptation losses contain the cross-entropy already, hence μ = 0 (reading P3-7).
    The notes of ``pafl_kd`` and ``pafl_ewc`` apply here too.
    ``checkpoint = "best_federated_validation"`` predicts with the model that had the smallest mean
    validation loss over the participants of the round in which they received it; P3 tests "the last
    version before divergence" (P3-15). The model after the last round is no candidate.
    P3's optional last round, in which every client keeps its local model, is ``adapt = "kd"`` or
    ``"ewc"`` after the run.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..adapt.ewc import Kind, Source, Step, consolidate, fisher, require_aux, strength
from ..adapt.kd import DistillStep, Form, Terms, descent, distillation, losses
from ..core.algorithm import GlobalModel, Round, Traits, check_pull, rows
from ..core.batches import Batch
from ..core.client import Client
from ..core.mixing import mix, shares
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Auto, NotNegative, Positive, Share
from ..core.tree import Tree
from ..errors import ConfigError
from .features import average_of
from .fedavg import ServerLr, Update, Weighting, average
from .fedprox import proximal

Custom = Callable[[Client, Tensor, Tensor, Batch], Tensor]  # D(client, C, G, batch)
Personal = Literal["kd", "ewc", "proximal"]
Checkpoint = Literal["last", "best_federated_validation"]


class Phase(NamedTuple):
    """What clients minimise in a round: ``mu · CE + (1 − mu) · personal``."""

    mu: float
    personal: Personal | Custom


Schedule = Callable[[int, int], Phase]  # (round t from 0, number of rounds T) -> the loss of t


class Server(NamedTuple):
    theta: Tensor  # [P]
    fisher: Tree  # [parameters] the last participants' average; () unless ``aggregate``
    best: Tree  # [P] the model with the lowest validation loss so far; () without checkpoint
    lowest: Tree  # [] the validation loss of ``best``
    taught: Tensor  # [2] mean loss before and after training by distillation; 0 without it


class Sent(NamedTuple):
    theta: Tensor  # [P]
    fisher: Tree  # [parameters], or () where there is none to send


class Trained(NamedTuple):
    """What a client sends."""

    update: Update
    fisher: Tree  # [parameters] at the received model, where it is averaged for the next round
    loss: Tree  # [] of the received model on validation data, with checkpoint
    taught: Tree  # [2] loss before and after training, where the loss contains distillation


class Options(NamedTuple):
    """The constants of all personalisation losses."""

    terms: Terms
    lam: float | Auto = 0.0
    fisher_kind: Kind = "empirical"
    fisher_data: Source = "client_train"
    ewc_step: Step = "explicit"
    kd_step: DistillStep = "full"


def halved(t: int, horizon: int, personal: Personal) -> Phase:
    """The paper's schedule: FedAvg for t < T/2, then the loss of an adaptation alone."""
    return Phase(1.0, personal) if t < horizon / 2 else Phase(0.0, personal)


def personal_training(
    client: Client, G: Tensor, phase: Phase, options: Options, given: Tree
) -> Tensor:
    """Local training from G with the loss of a phase; ``given`` is a Fisher diagonal or ()."""
    mu, personal = phase
    if mu == 1.0:
        return client.train(G)
    if personal == "ewc":  # μ CE + (1 − μ)(CE + R) = CE + (1 − μ) R
        M = given if isinstance(given, Tensor) else fisher(client, G, options.fisher_kind)
        lam = (1 - mu) * strength(client, M, options.lam)
        return consolidate(client, G, G, M, lam, options.ewc_step)

    def distance(w: Tensor, batch: Batch) -> Tensor:
        if personal == "kd":
            return distillation(client, w, G, batch, options.terms)
        if personal == "proximal":
            return proximal(client.trainable(w), client.trainable(G), 1.0)
        return personal(client, w, G, batch)

    def loss(w: Tensor, batch: Batch) -> Tensor:
        own = (1 - mu) * distance(w, batch)
        return mu * client.loss(w, batch) + own if mu else own

    return descent(client, G, loss, options.kd_step if personal == "kd" else "full")


def taught_loss(client: Client, w: Tensor, G: Tensor, mu: float, terms: Terms) -> Tensor:
    """``mu · CE + (1 − mu) · distillation`` on all training data, in evaluation mode."""

    def each(block: Batch) -> Tensor:
        own = mu * client.losses(w, block) + (1 - mu) * losses(client, w, G, block, terms)
        return own[:, None]

    return average_of(client, each)[0]


@dataclass(frozen=True, kw_only=True)
class Personalising(GlobalModel[Server, Sent, Trained, tuple[()]]):
    """Base class of the PaFL methods: FedAvg with a schedule of client losses.

    Fields:
        checkpoint: predict with the ``last`` model or the ``best_federated_validation`` one.
    """

    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0
    checkpoint: Checkpoint = "last"

    private = Declaration(
        lambda self, when: (Query(gradients=2 if self.bounded(*when[:2]) else 1),),
        "the number of samples; of distillation two losses; with checkpoint a validation loss",
        lambda self: self.exact,
    )

    @abstractmethod
    def phase(self, t: int, horizon: int) -> Phase:
        """The loss that clients minimise in round t."""

    def bounded(self, t: int, horizon: int) -> bool:
        """Whether a second gradient bounds the steps of round t."""
        mu, personal = self.phase(t, horizon)
        return mu < 1.0 and personal == "kd" and self.options.kd_step == "bounded"

    @property
    def exact(self) -> str:
        """What clients compute from all their samples without noise."""
        theirs = self.options.fisher_data != "server_aux"
        elastic = theirs and any(self._elastic(t, 2) for t in range(2))
        return "its Fisher diagonal is exact; use fisher_data = 'server_aux'" if elastic else ""

    @property
    @abstractmethod
    def options(self) -> Options:
        """The constants of the losses."""

    @property
    def _validated(self) -> bool:
        return self.checkpoint != "last"

    @property
    def traits(self) -> Traits:
        return Traits(uses_validation=self._validated)

    def init(self, problem: Problem) -> tuple[Server, tuple[()]]:
        source, validated = self.options.fisher_data, self._validated
        if source == "server_aux":
            require_aux(problem, "algorithm")
        none = problem.start.new_zeros(problem.model.parameters)
        lowest = problem.start.new_full((), torch.inf)
        return Server(
            problem.start,
            none if source == "aggregate" else (),
            problem.start if validated else (),
            lowest if validated else (),
            problem.start.new_zeros(2),
        ), ()

    def _elastic(self, t: int, horizon: int) -> bool:
        """Whether clients need a Fisher diagonal in round t."""
        mu, personal = self.phase(t, horizon) if t < horizon else (1.0, "")
        return mu < 1.0 and personal == "ewc"

    def _asked(self, t: int, horizon: int) -> bool:
        """Whether clients report a Fisher diagonal in round t, for the next one."""
        return self.options.fisher_data == "aggregate" and self._elastic(t + 1, horizon)

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        """The loss that clients minimise, and whether they report a Fisher diagonal."""
        return self.phase(index, horizon), self._asked(index, horizon)

    def download(self, server: Server, round: Round) -> Sent:
        """The global model and, where clients need but do not compute it, its Fisher diagonal."""
        count, M = len(round.clients), server.fisher
        needed = self._elastic(round.index, round.horizon)
        if needed and self.options.fisher_data in ("auto", "server_aux") and round.aux is not None:
            M = fisher(round.aux, server.theta, self.options.fisher_kind, alone=True)
        sent = needed and isinstance(M, Tensor)
        return Sent(rows(server.theta, count), rows(M, count) if sent else ())

    def local(self, client: Client, received: Sent, state: tuple[()]) -> tuple[Trained, tuple[()]]:
        G, t, horizon = received.theta, client.round, client.horizon
        w = personal_training(client, G, self.phase(t, horizon), self.options, received.fisher)
        report = fisher(client, G, self.options.fisher_kind) if self._asked(t, horizon) else ()
        loss = client.loss(G, "val") if self._validated else ()
        mu, personal = self.phase(t, horizon)
        taught: Tree = ()
        if mu < 1.0 and personal == "kd":
            terms = self.options.terms
            taught = torch.stack([taught_loss(client, v, G, mu, terms) for v in (G, w)])
        return Trained(Update(w, client.size), report, loss, taught), ()

    def aggregate(self, server: Server, uploads: Trained, round: Round) -> Server:
        """Average the models; keep the one with the lowest validation loss."""
        theta = average(server.theta, uploads.update, self.weighting, self.server_lr)
        p, (M, best, lowest, _) = shares(uploads.update.size, self.weighting), server[1:]
        if isinstance(uploads.fisher, Tensor):
            M = mix(p, uploads.fisher)
        if isinstance(uploads.loss, Tensor):
            loss = mix(p, uploads.loss)
            best = torch.where(loss < lowest, server.theta, best)
            lowest = torch.minimum(loss, lowest)
        known = isinstance(uploads.taught, Tensor)
        taught = mix(p, uploads.taught) if known else torch.zeros_like(server.taught)
        return Server(theta, M, best, lowest, taught)

    def observed(self, server: Server) -> dict[str, Any]:
        """The participants' mean loss before and after they trained by distillation."""
        return {"distillation": server.taught.tolist()} if bool(server.taught.any()) else {}

    def model(self, server: Server) -> Tensor:
        """The newest global model, or the one with the lowest validation loss."""
        model: Tensor = server.best if self._validated else server.theta
        return model

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse Fisher data that the server lacks, and a schedule whose μ is out of range."""
        self.init(problem)
        for t in range(rounds):
            mu, personal = self.phase(t, rounds)
            if not 0 <= mu <= 1:
                raise ConfigError(
                    f"pafl.schedule: found μ = {mu} in round {t}; expected a number from 0 to 1"
                )
            if personal == "proximal":
                check_pull(problem, rounds, "pafl.mu", 1 - mu)


BIBTEX = """@article{iacob2023pafl,
  title={Can Fair Federated Learning Reduce the Need for Personalisation?},
  author={Iacob, Alex and Gusm{\\~a}o, Pedro P. B. and Lane, Nicholas D.},
  journal={arXiv:2305.02728}, year={2023}}"""


@dataclass(frozen=True)
class PaFL(Personalising):
    """Personalisation-aware averaging with any schedule.

    Fields:
        schedule: ``constant`` has the loss ``personal`` in every round; from Python also any
            function of (t, T) that returns (μ, D).
        mu: weight μ of the cross-entropy in ``constant``; 1 is FedAvg.
        personal: the loss D of ``constant``: ``kd``, ``ewc`` or ``proximal`` (½‖C − G‖²).
        tau: temperature τ of the distillation.
        alpha: weight α of the distillation.
        kd_form: ``hinton``, ``paper`` or ``yu_code``.
        lam: strength λ of EWC; ``auto`` is 1 / (η max M).
        fisher_kind: ``empirical``, ``true`` or ``batch_mean``.
        fisher_data: ``server_aux``, ``client_train``, ``aggregate`` or ``auto``.
    """

    schedule: Literal["constant"] | Schedule = "constant"
    mu: Share = 0.5
    personal: Personal = "kd"
    tau: Positive = 6.0
    alpha: Share = 0.95
    kd_form: Form = "hinton"
    lam: NotNegative | Auto = "auto"
    fisher_kind: Kind = "empirical"
    fisher_data: Source = "auto"

    bibtex: ClassVar[str] = BIBTEX

    def phase(self, t: int, horizon: int) -> Phase:
        if callable(self.schedule):
            return Phase(*self.schedule(t, horizon))
        return Phase(self.mu, self.personal)

    @property
    def options(self) -> Options:
        terms = Terms(self.tau, self.alpha, self.kd_form)
        return Options(terms, self.lam, self.fisher_kind, self.fisher_data)
