"""Times a local step of a chunk by its number of clients: what a step costs beside its clients.

    python bench/chunk_steps.py cuda

A step of ``n`` clients takes about ``a + b n``; ``a / b`` is the overhead that the module
``engines/vmap`` estimates from the model's work. FedAvg on made-up data, clients of 20
batches, tf32 on a GPU.
"""

import sys
from statistics import median

import torch

from coterie.algorithms.fedavg import FedAvg
from coterie.engines.process import settings
from coterie.engines.simulator import Simulator
from coterie.engines.vmap import VmapBackend, overhead_of
from coterie.training.rounds import train
from timing import rounds_timed
from workloads import COLOUR, GREY, MLP, Workload

STEPS, ROUNDS = 20, 6
MODELS = (
    ("mlp", MLP, GREY, 10),
    ("lenet5", {}, GREY, 32),
    ("fedavg_cnn", {}, GREY, 50),
    ("fedavg_cnn", {}, COLOUR, 50),
    ("p2_cnn", {}, COLOUR, 50),
)


def milliseconds(work: Workload, device: torch.device) -> tuple[float, int]:
    """The median of a replayed step, and the overhead that the engine assumes."""
    on = work.simulation(device)
    engine = VmapBackend(on.problem, on.shards, chunk=work.clients)
    rounds = train(work.method, on.problem, Simulator(engine), ROUNDS, evaluate_every=ROUNDS)
    seconds = rounds_timed(rounds, ROUNDS, device)
    return 1000 * median(seconds[1:-1]) / STEPS, overhead_of(on.problem)


def main(device: torch.device) -> None:
    """Print a line per model."""
    counts = (1, 2, 4, 8, 16, 32) if device.type == "cuda" else (1, 2, 4)
    for model, options, shape, batch in MODELS:
        found = []
        for clients in counts:
            name, method = f"{model} {shape} batch {batch}", FedAvg()
            work = Workload(name, "", method, model, options, shape, clients, STEPS * batch, batch)
            time_of, assumed = milliseconds(work, device)
            found.append(f"{clients}: {time_of:.3f}")
        print(f"{name}, ms per step of so many clients: {', '.join(found)}; overhead {assumed}")


if __name__ == "__main__":
    with settings(tf32=True):
        main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
