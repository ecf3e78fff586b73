"""Flower's simulation: the Ray backend, ``FedAvg`` of ``flwr.serverapp``, an actor a core.

A round is what ``Strategy.start`` does in one, without its evaluation: configure, send and receive,
aggregate. The data and the network stay in the actors; models travel as Flower's arrays.
"""

import os
import tempfile
import time
from importlib.metadata import version
from typing import Any

from wire import WARM_UP, Wire

WIRE = Wire()
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import flower_client  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from networks import network, size  # noqa: E402

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train until the driver has enough."""
    spec = WIRE.spec
    module = network(spec["model"])
    arrays = ArrayRecord(module.state_dict())
    keys = ("model", "shape", "clients", "samples", "batch", "lr")
    config = ConfigRecord({key: spec[key] for key in keys})
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=spec["clients"])
    rounds = 0
    while rounds < WARM_UP or WIRE.wanted():
        rounds += 1
        began = time.perf_counter()
        messages = strategy.configure_train(rounds, arrays, config, grid)
        replies = list(grid.send_and_receive(messages, timeout=3600))
        averaged, _ = strategy.aggregate_train(rounds, replies)
        seconds = time.perf_counter() - began
        steps, arrays = _steps(replies), averaged or arrays
        if rounds > WARM_UP:
            WIRE.answer(seconds, steps)
            continue
        WIRE.took(steps)
        if rounds == WARM_UP:
            WIRE.ready(_version(), f"ray, {spec['cores']} actor(s) of 1 thread", size(module))


def _steps(replies: list[Any]) -> int:
    failed = [reply.error.reason for reply in replies if reply.has_error()]
    if failed:
        raise RuntimeError(f"{len(failed)} clients failed; the first: {failed[0]}")
    return sum(int(reply.content["metrics"]["steps"]) for reply in replies)


def _version() -> str:
    return f"flwr {version('flwr')}, ray {version('ray')}, torch {torch.__version__}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        start = {
            "num_cpus": WIRE.spec["cores"],
            "_temp_dir": folder,
            "log_to_driver": False,
            "object_store_memory": 512 * 2**20,
        }
        run_simulation(
            server_app=server,
            client_app=flower_client.app,
            num_supernodes=WIRE.spec["clients"],
            backend_config={
                "init_args": start,
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
