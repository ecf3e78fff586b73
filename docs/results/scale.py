"""Measure what a round costs a server, and print the tables of docs/scale.md.

    python docs/results/scale.py ledger      # bytes per method, in models
    python docs/results/scale.py transport   # seconds per 100 MB
    python docs/results/scale.py server      # seconds of guard and aggregation
    python docs/results/scale.py ray         # seconds of Ray's object store and tasks

Times are processor seconds of one thread, the least of several turns: the machine may be busy with
other jobs. Those of a checkpoint and of Ray are seconds by the clock.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from coterie.algorithms import ALGORITHMS
from coterie.algorithms.fedavg import Update
from coterie.core import tree
from coterie.core.algorithm import AnyAlgorithm, round_of
from coterie.core.optim import Recipe
from coterie.core.policies import governed
from coterie.core.rows import dense
from coterie.core.tree import Tree
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import Simulation, simulate
from coterie.engines import make_engine
from coterie.engines.codec import Message, decode, digest, encode, vocabulary
from coterie.runs import checkpoint
from coterie.runs.environment import commit
from coterie.training import guard
from coterie.training.rounds import train

TURNS = 5
FEATURES = 16
SERVERS = ("fedavg", "fedamp", "fedfomo", "federico", "cfl")
SHAPES = ((100, 250_000), (1000, 25_000))  # clients, parameters: 100 MB of models each


def federation(clients: int) -> Federation:
    """Clients of four samples for training, two for validation and two for testing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * clients, FEATURES, generator=generator)
    data = Dataset("made up", x, torch.arange(8 * clients) % 4, 4)
    parts = torch.arange(8 * clients).view(clients, 8)
    splits = [tuple(part) for part in (parts[:, :4], parts[:, 4:6], parts[:, 6:])]
    names = tuple(f"site {i}" for i in range(clients))
    return Federation(data, "made up", names, *splits)


def problem(algorithm: AnyAlgorithm, clients: int, parameters: int) -> Simulation:
    """A network of about so many parameters: two layers of one width."""
    width = max(4, parameters // (FEATURES + 5))
    return simulate(
        federation(clients),
        lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 4)),
        Recipe(lr=0.1, epochs=1, batch=4),
        merge_val=not algorithm.traits.uses_validation,
        sharing=algorithm.traits.sharing,
    )


def least(
    work: Callable[[], object], turns: int = TURNS, clock: Callable[[], float] = time.process_time
) -> float:
    """The seconds of the fastest turn."""
    found = []
    for _ in range(turns):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


# ---- bytes ---------------------------------------------------------------------------------------


def held(value: Tree) -> int:
    """The bytes of all tensors of a tree."""
    found = [dense(leaf) for _, leaf in tree.flatten(value)]
    return sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor))


def bytes_of(name: str, clients: int, parameters: int) -> list[float]:
    """In the fourth round: down, up, serve and state per client; the server's; all in models."""
    algorithm = ALGORITHMS[name]()
    on = problem(algorithm, clients, parameters)
    engine = make_engine("loop", on.problem, on.shards)
    *_, last = train(algorithm, on.problem, engine, 4)
    one = on.problem.start.nbytes
    per_client = [*last.traffic, held(last.states)]
    return [size / one / clients for size in per_client] + [held(last.server) / one]


def ledger() -> None:
    """What every method sends and holds, in models, for 12 and for 24 clients."""
    print("| method | down | up | for evaluation | state of a client | server, K = 12 | K = 24 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in ALGORITHMS:
        try:
            few, many = (bytes_of(name, clients, 20_000) for clients in (12, 24))
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {error} |")
            continue
        own = [
            f"{a:.2f}" if f"{a:.2f}" == f"{b:.2f}" else f"{a:.2f} → {b:.2f}"
            for a, b in zip(few[:4], many[:4], strict=True)
        ]
        print(f"| {name} | {' | '.join(own)} | {few[4]:.1f} | {many[4]:.1f} |")


# ---- seconds -------------------------------------------------------------------------------------


def transport() -> None:
    """Seconds for 100 MB: codec, sha256, safetensors, a checkpoint."""
    model = torch.randn(25_000_000)
    upload = Update(model, torch.tensor(1))
    types = vocabulary(ALGORITHMS["fedavg"]())
    data, stored = encode(Message({}, upload)), save({"0": model})
    rows = model.view(100, -1)
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        place = Path(folder)
        written = least(lambda: checkpoint.write(place, 1, (), (rows,), {}), 5, time.perf_counter)
        checked = least(lambda: checkpoint.newest(place), 5, time.perf_counter)
    found = {
        "codec.encode": least(lambda: encode(Message({}, upload))),
        "codec.decode": least(lambda: decode(data, types)),
        "sha256": least(lambda: digest(data)),
        "safetensors save, in memory": least(lambda: save({"0": model})),
        "safetensors load, in memory": least(lambda: load(stored)),
        "copy in memory": least(lambda: model.clone()),
        "check that it is finite": least(lambda: bool(model.isfinite().all())),
        "checkpoint written": written,
        "checkpoint read and checked": checked,
    }
    print("| for 100 MB | seconds |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.3f} |")


def phases(name: str, clients: int, parameters: int) -> Iterator[tuple[str, float]]:
    """Seconds of the server's part of the third round."""
    algorithm = ALGORITHMS[name]()
    on = problem(algorithm, clients, parameters)
    algorithm = governed(algorithm, on.problem)
    engine = make_engine("loop", on.problem, on.shards)
    server, states = algorithm.init(on.problem)
    engine.begin(on.problem, algorithm, states)
    accepted, rule = torch.zeros(clients, dtype=torch.float64), guard.Guard()
    for index in range(3):
        round = round_of(on.problem, index, 10, on.problem.able)
        received = algorithm.download(server, round)
        replies = engine.exchange(algorithm, received, round)
        before = server
        server, _, _ = guard.aggregate(algorithm, before, replies.uploads, round, rule)
        engine.commit(replies.clients)
    sizes, uploads = on.problem.sizes, replies.uploads
    yield "download", least(lambda: algorithm.download(before, round), 3)
    yield "guard", least(lambda: guard.screen(uploads, round, sizes, rule, received, accepted), 3)
    yield "aggregate", least(lambda: guard.aggregate(algorithm, before, uploads, round, rule), 3)
    yield (
        "matrix",
        least(lambda: algorithm.collaboration(server, engine.shown(algorithm), round), 3),
    )


def server() -> None:
    """Seconds of the server's part of a round, for 100 MB of models altogether."""
    print("| method | K | P | download | guard | aggregate | matrix |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in SERVERS:
        for clients, parameters in SHAPES:
            try:
                found = [f"{seconds:.3f}" for _, seconds in phases(name, clients, parameters)]
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            print(f"| {name} | {clients:,} | {parameters:,} | {' | '.join(found)} |", flush=True)


def ray_costs() -> None:
    """Seconds by the clock of Ray itself, with two workers."""
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, **options)
    model = torch.randn(25_000_000).numpy()
    task, sent = ray.remote(_nothing), ray.put(model)
    ray.get([task.remote(sent) for _ in range(4)])
    clock = time.perf_counter
    found = {
        "100 MB put into the object store": least(lambda: ray.put(model), 20, clock),
        "100 MB read from it": least(lambda: ray.get(sent).copy(), 20, clock),
        "8 empty tasks": least(lambda: ray.get([task.remote(1) for _ in range(8)]), 100, clock),
    }
    print("| | seconds |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.4f} |")
    ray.shutdown()


def _nothing(value: object) -> int:
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"commit {commit()}, torch {torch.__version__}, one thread\n")
    {"ledger": ledger, "transport": transport, "server": server, "ray": ray_costs}[sys.argv[1]]()
