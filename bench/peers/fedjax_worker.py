"""Google's FedJAX: ``fedjax.algorithms.fed_avg`` over ``for_each_client``.

Settings: "jit" is its default backend, one client after another; "one_core" is the same in a
process that may use one core only; "pmap" is its parallel backend, a client a device, with a host
device a core. It has no vmap backend. The fastest of them counts. Small steps are slower with two
cores than with one, also with XLA's threads for products and its asynchronous dispatch turned off.

FedJAX calls ``jax.tree_map`` and ``jax.device_put_sharded``, which JAX 0.4.35 has and 0.10.2 has
not. XLA's older CPU runtime is asked for: on a busy machine LeNet-5 took 6 s a round with it and
15 s with that version's default.
"""

import os
import time
from typing import Any

from wire import WARM_UP, Wire

WIRE = Wire()
SETTING = WIRE.spec["setting"]
BACKEND = "pmap" if SETTING == "pmap" else "jit"
DEVICES = WIRE.spec["cores"] if SETTING == "pmap" else 1
if SETTING == "one_core":  # before JAX is imported: it makes its threads then
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"--xla_cpu_use_thunk_runtime=false --xla_force_host_platform_device_count={DEVICES}"
)

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

jax.config.update("jax_pmap_no_rank_reduction", False)  # what FedJAX's pmap backend was written for

BODIES: dict[str, list[Any]] = {
    "mlp": [200],
    "lenet5": [(6, "SAME"), (16, "VALID"), 120, 84],
    "fedavg_cnn": [(32, "SAME"), (64, "SAME"), 512],
}


class Counted:
    """A preprocessor that leaves batches alone and counts them: a batch is a step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Count a batch and pass it on."""
        self.steps += 1
        return batch

    def taken(self) -> int:
        """The steps since the last call."""
        steps, self.steps = self.steps, 0
        return steps


def forward(batch: dict[str, Any]) -> Any:
    """Scores of a batch: a pair is a 5x5 convolution with ReLU and pool, a number a dense layer."""
    h, flat = batch["x"], False
    for layer in BODIES[WIRE.spec["model"]]:
        if isinstance(layer, tuple):
            channels, padding = layer
            h = jax.nn.relu(hk.Conv2D(channels, 5, padding=padding)(h))
            h = hk.MaxPool(2, 2, "VALID")(h)
        else:
            h = h if flat else hk.Flatten()(h)
            flat = True
            h = jax.nn.relu(hk.Linear(layer)(h))
    return hk.Linear(10)(h)


def clients(counted: Counted) -> list[tuple[bytes, fedjax.ClientDataset, Any]]:
    """Every client's name, data (in JAX's layout, channels last) and key."""
    spec = WIRE.spec
    channels, height, width = spec["shape"]
    draws = np.random.default_rng(0)
    keys = jax.random.split(jax.random.PRNGKey(0), spec["clients"])
    made = []
    for i in range(spec["clients"]):
        x = draws.standard_normal((spec["samples"], height, width, channels), np.float32)
        y = np.arange(spec["samples"]) % 10
        made.append((b"%d" % i, fedjax.ClientDataset({"x": x, "y": y}, counted), keys[i]))
    return made


def main() -> None:
    """Train until the driver has enough."""
    spec, counted = WIRE.spec, Counted()
    cohort = clients(counted)
    sample = {key: value[: spec["batch"]] for key, value in cohort[0][1].raw_examples.items()}
    model = fedjax.create_model_from_haiku(
        hk.transform(forward),
        sample,
        lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores),
    )
    fedjax.set_for_each_client_backend(BACKEND)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(spec["lr"]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=spec["batch"], num_epochs=1),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    rounds = 0
    while rounds < WARM_UP or WIRE.wanted():
        began = time.perf_counter()
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        seconds = time.perf_counter() - began
        rounds += 1
        if rounds > WARM_UP:
            WIRE.answer(seconds, counted.taken())
            continue
        WIRE.took(counted.taken())
        if rounds == WARM_UP:
            size = sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params))
            cores = len(os.sched_getaffinity(0))
            WIRE.ready(_version(), f"{BACKEND}, {DEVICES} device(s), {cores} core(s)", size)


def _version() -> str:
    from importlib.metadata import version

    return f"fedjax {version('fedjax')}, jax {jax.__version__}"


if __name__ == "__main__":
    main()
