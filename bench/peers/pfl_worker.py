"""Apple's pfl: ``SimulatedBackend``, ``FederatedAveraging`` and ``PyTorchModel``.

Settings: "threads" is one process with a thread a core; "processes" is its documented distributed
simulation, a process a core with one thread each, which share out the users and all-reduce.

Every user's batches are tensors cut once, which pfl caches; it does not shuffle. pfl evaluates on
its first iteration whatever it is told, so that one is a warm-up. ``use_torch_compile`` is off: it
compiles ``forward``, and pfl calls ``loss``, which goes past it.
"""

import os
import socket
import subprocess
import sys
import time

from wire import WARM_UP, Wire

RANK = "PFL_WORKER_RANK"


def join_others(processes: int) -> None:
    """Become the first of several: pfl reads who is who from the environment on import."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"127.0.0.1:{port}"] * processes)
    for rank in range(1, processes):
        environment = {**os.environ, RANK: str(rank)}
        subprocess.Popen([sys.executable, *sys.argv], env=environment, stdin=subprocess.DEVNULL)
    os.environ[RANK] = "0"


WIRE = Wire()
PROCESSES = WIRE.spec["cores"] if WIRE.spec["setting"] == "processes" else 1
if PROCESSES > 1 and RANK not in os.environ:
    join_others(PROCESSES)
FIRST = os.environ.get(RANK, "0") == "0"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from networks import data, network, size  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from pfl.version import __version__  # noqa: E402
from torch import Tensor, nn  # noqa: E402


class Net(nn.Module):
    """A network with the two methods pfl asks for; it counts its SGD steps."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = network(model)
        self.steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of a batch; called once an SGD step."""
        self.steps += 1
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """What pfl evaluates on its first iteration; it is not timed."""
        return {"loss": Weighted(F.cross_entropy(self.net(x), y).item() * len(y), len(y))}


class Turns(TrainingProcessCallback):
    """Stops between rounds until the driver wants one; times from there to the updated model."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._began = 0.0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Answer for the round that ended, then wait for the next."""
        seconds, rounds = time.perf_counter() - self._began, central_iteration + 1
        steps = self._steps()
        if FIRST:
            self._report(rounds, seconds, steps)
        more = rounds < WARM_UP or self._more()
        self._began = time.perf_counter()
        return not more, Metrics()

    def _steps(self) -> int:
        """The steps that all processes took since the last call."""
        steps = torch.tensor(self._net.steps)
        self._net.steps = 0
        if PROCESSES > 1:
            torch.distributed.all_reduce(steps)
        return int(steps)

    def _report(self, rounds: int, seconds: float, steps: int) -> None:
        if rounds > WARM_UP:
            WIRE.answer(seconds, steps)
            return
        WIRE.took(steps)
        if rounds == WARM_UP:
            setting = f"{PROCESSES} process(es) of {torch.get_num_threads()} thread(s)"
            version = f"pfl {__version__}, torch {torch.__version__}"
            WIRE.ready(version, setting, size(self._net))

    def _more(self) -> bool:
        """Whether the driver wants a round; the other processes wait for the first to hear."""
        if PROCESSES == 1:
            return WIRE.wanted()
        word = torch.tensor(FIRST and WIRE.wanted())
        torch.distributed.broadcast(word, 0)
        return bool(word)


def main() -> None:
    """Train until the driver has enough."""
    torch.set_num_threads(WIRE.spec["cores"] // PROCESSES)
    torch.manual_seed(0)
    net = Net(WIRE.spec["model"])
    algorithm, train = parameters()
    FederatedAveraging().run(
        algorithm_params=algorithm,
        backend=backend(),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=train,
        callbacks=[Turns(net)],
        send_metrics_to_platform=False,
    )


def backend() -> SimulatedBackend:
    """All users, each with its data, in turn."""
    users = [Dataset(pair) for pair in data(WIRE.spec)]
    sampler = get_user_sampler("minimize_reuse", range(len(users)))
    federated = FederatedDataset(users.__getitem__, sampler)
    return SimulatedBackend(federated, federated)


def parameters() -> tuple[NNAlgorithmParams, NNTrainHyperParams]:
    """Of the algorithm, and of local training."""
    spec, rounds = WIRE.spec, 10**6  # the callback ends the run
    algorithm = NNAlgorithmParams(rounds, rounds, spec["clients"], None)
    train = NNTrainHyperParams(
        local_batch_size=spec["batch"], local_num_epochs=1, local_learning_rate=spec["lr"]
    )
    return algorithm, train


if __name__ == "__main__":
    main()
