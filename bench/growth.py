"""The cost of a round as the number of participants, or of registered clients, grows.

The rounds are those of the real round loop, with guard and messages but without evaluation: the
loop is left before its last round, the only one that is always evaluated.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from coterie.algorithms.ditto import Ditto
from coterie.algorithms.fedavg import FedAvg
from coterie.core.algorithm import AnyAlgorithm
from coterie.engines import EngineSettings, Length, make_engine
from coterie.engines.process import settings, threads_of
from coterie.training.rounds import train
from timing import WARM, rounds_timed, tell, watched
from workloads import GREY, Workload

LONG = 1000  # rounds that engines are told the run has, so that measuring and tracing pay off
SIZES = (10, 30, 100, 300, 1000)  # clients of a round
REGISTERED = (100, 1000, 10_000)  # clients of which PARTICIPANTS take part
PARTICIPANTS = 100
METHODS: dict[str, AnyAlgorithm] = {"FedAvg": FedAvg(), "Ditto": Ditto()}

LENET = Workload("", "FedAvg, LeNet-5", FedAvg(), "lenet5", {}, GREY, 0, 50, 10)


class Cost(NamedTuple):
    """The cost of one round of a method with this many clients."""

    method: str
    registered: int
    clients: int  # that take part
    engine: str
    seconds_per_round: float
    seconds_per_client: float
    peak_mib: float | None  # of states, models and messages, beyond the data
    device: str


def scale(device: torch.device, repeats: int, sizes: Sequence[int] = SIZES) -> Iterator[Cost]:
    """The cost of a round for growing numbers of clients, all of which take part."""
    return (_cost("FedAvg", size, size, device, repeats) for size in sizes)


def population(
    device: torch.device, repeats: int, sizes: Sequence[int] = REGISTERED
) -> Iterator[Cost]:
    """The cost of a round for growing numbers of registered clients, with equal participants."""
    part = min(PARTICIPANTS, *sizes)
    return (_cost(name, size, part, device, repeats) for name in METHODS for size in sizes)


def _cost(method: str, registered: int, clients: int, device: torch.device, repeats: int) -> Cost:
    tell(f"{method}, {clients} of {registered} clients")
    work = LENET._replace(method=METHODS[method], clients=registered, holders=clients)
    share, rounds = clients / registered, WARM + repeats
    on = work.simulation(device)
    engine = make_engine(EngineSettings(), on.problem, on.shards, Length(LONG))
    with settings(threads=threads_of(engine.choice)), watched(device) as peak:
        records = train(
            work.method,
            on.problem,
            engine,
            rounds + 1,
            participation=share,
            evaluate_every=rounds + 2,
        )
        a_round = statistics.median(rounds_timed(records, rounds, device)[WARM:])
    chosen = str(engine.choice["engine"])
    each = a_round / clients
    return Cost(method, registered, clients, chosen, a_round, each, peak.mib, str(device))
