"""The cost of a round as the number of participants, or of registered clients, grows.

The rounds are those of the real round loop, with guard and messages but without evaluation: the
loop is left before its last round, the only one that is always evaluated.
"""

import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch

from ...algorithms.ditto import Ditto
from ...algorithms.fedavg import FedAvg
from ...core.algorithm import AnyAlgorithm
from ...engines import make_engine
from ...engines.process import of_engine, settings
from ...training.rounds import Record, train
from . import LONG, check, tell
from .peak_memory import watched
from .turns import WARM
from .workloads import GREY, Workload

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


def scale(
    device: str, repeats: int, sizes: tuple[int, ...] = SIZES, *, force: bool
) -> Iterator[Cost]:
    """The cost of a round for growing numbers of clients, all of which take part."""
    check(device, "float32", force=force)
    return (_cost("FedAvg", size, size, device, repeats) for size in sizes)


def population(
    device: str, repeats: int, sizes: tuple[int, ...] = REGISTERED, *, force: bool
) -> Iterator[Cost]:
    """The cost of a round for growing numbers of registered clients, with equal participants."""
    check(device, "float32", force=force)
    part = min(PARTICIPANTS, *sizes)
    return (_cost(name, size, part, device, repeats) for name in METHODS for size in sizes)


def _cost(method: str, registered: int, clients: int, device: str, repeats: int) -> Cost:
    tell(f"{method}, {clients} of {registered} clients")
    at = torch.device(device)
    work = LENET._replace(method=METHODS[method], clients=registered, holders=clients)
    share, rounds = clients / registered, WARM + repeats
    on = work.simulation(at)
    engine = make_engine("auto", on.problem, on.shards, rounds=LONG)
    with settings(**of_engine(engine.choice, at)), watched(at) as peak:
        records = train(
            work.method,
            on.problem,
            engine,
            rounds + 1,
            participation=share,
            evaluate_every=rounds + 2,
        )
        seconds = list(_seconds(islice(records, rounds), at))
    a_round = statistics.median(seconds[WARM:])
    chosen = str(engine.choice["engine"])
    return Cost(method, registered, clients, chosen, a_round, a_round / clients, peak.mib, device)


def _seconds(records: Iterator[Record], device: torch.device) -> Iterator[float]:
    began = time.perf_counter()
    for _ in records:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter() - began
        began = time.perf_counter()
