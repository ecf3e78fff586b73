"""The interface of a federated method: a client half, a server half, and a message each way.

    server ──download──▶ row i ──▶ local(client_i, row_i, state_i) ──▶ upload_i, state_i'
       ▲                                                                   │
       └──────────────── aggregate(server, uploads, round) ◀───────────────┘
    prediction:  predictor(client_i, served_i, state_i) ──▶ Mixture

``local`` and ``predictor`` are written for ONE client and are the only code that sees data.
``download``, ``serve`` and ``aggregate`` work on stacked rows, one per client of the round, and
never see data. No function changes its arguments. A concrete method is a frozen dataclass whose
fields are its hyper-parameters.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError
from . import random
from .batches import Shape, View
from .calls import Clock
from .client import Client
from .fields import Checked
from .optim import Recipe
from .privacy import Declaration
from .problem import Problem
from .tree import Tree, row

Server = TypeVar("Server")
Down = TypeVar("Down")
Up = TypeVar("Up")
State = TypeVar("State")


class Round(NamedTuple):
    """One communication round as the server sees it."""

    index: int  # type: ignore[assignment]  # counts from 0
    horizon: int  # rounds of the whole run
    clients: Tensor  # [m] the clients that take part
    population: int
    seed: int
    lr: float  # the clients' learning rate in this round
    keys: Tensor  # [population] one number per client, derived from its name
    parameters: int  # how many entries of a model's vector are trained; buffers follow
    recipe: Recipe  # how the clients train
    aux: Client | None = None  # the server's own samples, where it holds any
    sent_to: Tensor | None = None  # [n] all clients that were sent a message; None: all replied

    @property
    def asked(self) -> Tensor:
        """The clients that were sent this round's message, whether they replied or not."""
        return self.clients if self.sent_to is None else self.sent_to

    def draw(self, purpose: str, *clients: Tensor, count: int | None = None) -> Tensor:
        """Uniform draws derived from (seed, round, purpose, clients), broadcast over clients.

        With ``count``, a last dimension holds that many draws for each entry.
        """
        words = [self.keys[c] for c in clients]
        if count is not None:
            words = [word.unsqueeze(-1) for word in words]
            words.append(torch.arange(count, device=self.keys.device))
        return random.uniform(self.seed, purpose, self.index, *words)

    def trainable(self, models: Tensor) -> Tensor:
        """The models' parameters without buffers, as distances and angles are computed on them."""
        return models[..., : self.parameters]


def of_server(problem: Problem, round_index: int, horizon: int) -> Client | None:
    """The server's own samples (``data.aux``) as one more client; None where it holds none."""
    if problem.aux is None:
        return None
    held = row(problem.aux.splits["train"].rows([0]), 0)
    view = View(
        id=torch.tensor(problem.population, device=problem.device),
        stream=random.bits(problem.seed, round_index, "server").to(problem.device),
        lr=torch.tensor(
            problem.recipe.rate(round_index), dtype=problem.dtype, device=problem.device
        ),
        train=held,
        val=held,
        relabel=problem.aux.relabel[0],
    )
    shape = Shape(len(problem.aux.x), {"train": True, "val": True}, batched=True)
    return Client(problem, problem.aux, view, shape, Clock(round_index, horizon))


def round_of(problem: Problem, index: int, horizon: int, clients: Tensor) -> Round:
    """The :class:`Round` of number ``index`` in which ``clients`` take part."""
    return Round(
        index=index,
        horizon=horizon,
        clients=clients,
        population=problem.population,
        seed=problem.seed,
        lr=problem.recipe.rate(index),
        keys=problem.keys,
        parameters=problem.model.parameters,
        recipe=problem.recipe,
        aux=of_server(problem, index, horizon),
    )


class Mixture(NamedTuple):
    """A client's predictor: ``p(y|x) = Σ_r weights[r] · softmax(h(models[r], x))``.

    A client whose weights are all zero has no predictor and is left out of the metrics.
    """

    weights: Tensor  # [r]
    models: Tensor  # [r, P]


class Recalling(NamedTuple):
    """A predictor that also looks samples up in what its client remembers (adapt.knn)."""

    weights: Tensor  # [r]
    models: Tensor  # [r, P]
    memory: Tree  # one row per model

    @property
    def mixture(self) -> Mixture:
        """The models alone: a memory never leaves the client."""
        return Mixture(self.weights, self.models)


Predictor = Mixture | Recalling


def single(w: Tensor) -> Mixture:
    """The predictor that consists of one model."""
    return Mixture(w.new_ones(1), w.unsqueeze(0))


# Statistics of a client's data that some methods send, as sites consent to them.
Disclosure = Literal["feature_mean", "class_features", "discriminators"]


class Sharing(NamedTuple):
    """Which raw samples a method wants all clients to train on."""

    pool: Literal["from_clients", "held_out"]
    share: float  # the fraction of the training data that is shared


@dataclass(frozen=True)
class Traits:
    """What a run must know about a method in addition to its two halves.

    Fields:
        uses_validation: clients weigh models on validation data; ``merge_val`` then keeps it apart.
        everybody: all clients take part in every round, whatever the run samples.
        sharing: which raw samples leave the clients. An engine on a network refuses a method that
            shares any unless every site consents.
        models_change_hands: a model ends with the client that uses it most, not with the one that
            began it. ``A Aᵀ`` (clients that use the same models) then shows groups, ``A`` does not.
        weighs_again: a client weighs the others' models once more before it predicts, which no
            collaboration matrix records.
        several_models: a client trains several models side by side in one round.
        alone: clients neither send nor receive anything.
        discloses: what a client sends of its data beside models, by the name under which a site
            consents to it in ``site.toml``; empty for nothing.
    """

    uses_validation: bool = False
    everybody: bool = False
    sharing: Sharing | None = None
    models_change_hands: bool = False
    weighs_again: bool = False
    several_models: bool = False
    alone: bool = False
    discloses: Disclosure | Literal[""] = ""


class Algorithm(Checked, ABC, Generic[Server, Down, Up, State]):
    """The base class of all methods. The module's docstring shows how its functions are called."""

    title: ClassVar[str] = ""  # the paper's spelling of the name, where the class name differs
    bibtex: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # what the entry in BibTeX does not say
    private: ClassVar[Declaration | None] = None  # what [privacy] must know; None: it is refused

    @property
    def traits(self) -> Traits:
        """What a run must know about the method in addition to its halves."""
        return Traits()

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        """A key for what the client half reads from ``client.round`` and ``client.horizon``.

        Rounds with equal keys run the same operations, so one trace may be replayed in all of them.
        None declares nothing: a call that reads the round's number is then never traced.
        """
        return None

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse, before round 0, fields that do not fit this problem or this many rounds."""

    def optimizers(self, problem: Problem) -> int:
        """How many optimiser states a client keeps where ``train.optimizer_state`` is ``kept``.

        One per model that the client trains in a round and knows again in the next one; 0 where no
        state of a client's lives on. The n-th training of a round begins with the n-th state.
        """
        return 1

    @abstractmethod
    def init(self, problem: Problem) -> tuple[Server, State]:
        """The server before round 0, and the clients' states: one row per client ``[K, ...]``."""

    @abstractmethod
    def download(self, server: Server, round: Round) -> Down:
        """What the clients of the round receive, one row per client."""

    @abstractmethod
    def local(self, client: Client, received: Down, state: State) -> tuple[Up, State]:
        """One client's work in a round: returns its upload and its new state."""

    @abstractmethod
    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """The server after the round; ``round.clients`` are the clients that replied."""

    def serve(self, server: Server, round: Round) -> Tree:
        """What the clients receive to predict, one row per client; by default as in a round."""
        return self.download(server, round)

    @abstractmethod
    def predictor(self, client: Client, served: Tree, state: State) -> Mixture:
        """The model, or mixture of models, that one client predicts with."""

    def global_model(self, server: Server) -> Tensor | None:
        """The one model ``[P]`` that the method trains for all clients; None without one."""
        return None

    def shown(self, state: State) -> Tree:
        """The part of a client's state that :meth:`collaboration` reads; most methods need none.

        On a network this part leaves the site, with the site's consent.
        """
        return ()

    def collaboration(self, server: Server, shown: Any, round: Round) -> Tensor | None:
        """The matrix of collaboration weights ``[K, K]`` to plot; None where clients do not choose.

        Called after the round, with :meth:`shown` of all clients, one row per client. Row i holds
        the weights with which client i's model was made in the last round that client i took part
        in: the weights that were applied, not those that the next exchange would apply.
        """
        return None

    def observed(self, server: Server) -> dict[str, Any]:
        """Values for the run's log that the last round's participants reported, by name."""
        return {}


AnyAlgorithm = Algorithm[Any, Any, Any, Any]


def check_run(algorithm: AnyAlgorithm, problem: Problem, rounds: int) -> None:
    """Refuse, before round 0, a run that could not train in its last round."""
    recipe, least = problem.recipe, torch.finfo(problem.dtype).tiny
    if recipe.rate(0) > 0 and recipe.rate(rounds - 1) < least:
        raise ConfigError(
            f"train.decay: found {recipe.decay}, which takes the learning rate from {recipe.lr} to "
            f"{recipe.rate(rounds - 1):g} in {rounds} rounds; expected a rate of at least "
            f"{least:.0e} to the end: raise decay, or set train.floor"
        )
    algorithm.check(problem, rounds)


def check_pull(problem: Problem, rounds: int, field: str, strength: float) -> None:
    """Refuse an explicit gradient step on ``(strength/2)‖w − anchor‖²`` that overshoots.

    Heavy-ball steps of rate η and momentum β overshoot from ``η · strength = 2 (1 + β)`` on; the
    round with the largest η is checked. Adam is not checked: its steps have another length.
    """
    recipe = problem.recipe
    lr, limit = max(recipe.rate(0), recipe.rate(rounds - 1)), 2 * (1 + recipe.momentum)
    if recipe.optimizer == "sgd" and lr * strength >= limit:
        raise ConfigError(
            f"{field}: found a pull of {strength:g}, times a learning rate of {lr:g}: "
            f"{lr * strength:g}; expected below {limit:g}, from where on steps overshoot and grow; "
            f"lower {field.rpartition('.')[2]} or train.lr"
        )


class GlobalModel(Algorithm[Server, Down, Up, State]):
    """A method whose predictor is one model that the server sends to all clients."""

    @abstractmethod
    def model(self, server: Server) -> Tensor:
        """The global model ``[P]``."""

    def global_model(self, server: Server) -> Tensor | None:
        """The global model ``[P]``."""
        return self.model(server)

    def serve(self, server: Server, round: Round) -> Tensor:
        """The newest global model."""
        return self.model(server).expand(len(round.clients), -1)

    def predictor(self, client: Client, served: Tensor, state: State) -> Mixture:
        """The global model, unchanged."""
        return single(served)


class OwnModel(Algorithm[Server, Down, Up, State]):
    """A method whose predictor is a model that the client keeps."""

    @abstractmethod
    def model(self, state: State) -> Tensor:
        """The client's own model ``[P]``."""

    def serve(self, server: Server, round: Round) -> Tree:
        """Nothing: the client has what it needs."""
        return ()

    def predictor(self, client: Client, served: Tree, state: State) -> Mixture:
        """The client's own model."""
        return single(self.model(state))


def rows(value: Tensor, count: int) -> Tensor:
    """The same value for ``count`` clients, without copies."""
    return torch.as_tensor(value).expand(count, *value.shape)


# ---- digests of predictors: every engine gives the same digest for the same models --------------


def client_digest(predictor: Mixture) -> str:
    """The sha256 of one client's predictor: weights ``[r]``, then models ``[r, P]``.

    Models of weight zero have no effect and are left out, so that engines which pad a mixture give
    the same digest. Numbers are hashed in little-endian order.
    """
    used = predictor.weights != 0
    total = hashlib.sha256()
    for part in (predictor.weights[used], predictor.models[used]):
        array = part.detach().cpu().contiguous().numpy()
        total.update(f"{array.dtype.str[1:]}{list(array.shape)}".encode())
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()


def combined_digest(clients: Iterable[str]) -> str:
    """The digest of a run: the sha256 over the digests of its clients, in client order."""
    return hashlib.sha256("\n".join(clients).encode()).hexdigest()


def client_digests(mixture: Mixture) -> tuple[str, ...]:
    """The digest of each client's predictor, of ``weights [K, r]`` and ``models [K, r, P]``."""
    each = zip(mixture.weights.cpu(), mixture.models, strict=True)
    return tuple(client_digest(Mixture(*predictor)) for predictor in each)


def mixture_digest(mixture: Mixture) -> str:
    """The digest of all clients' predictors."""
    return combined_digest(client_digests(mixture))
