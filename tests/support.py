"""Small federations and runs that many tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.adapt import ADAPTATIONS, Adapted
from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.core.algorithm import AnyAlgorithm, Mixture, round_of
from coterie.core.batches import shape_of, views
from coterie.core.calls import Clock
from coterie.core.client import Client
from coterie.core.optim import Recipe
from coterie.core.tree import row
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import Simulation, simulate
from coterie.engines import EngineSettings, Length, make_engine
from coterie.engines.loop import LoopBackend
from coterie.engines.vmap import VmapBackend, compiler
from coterie.training.rounds import Record, train

with_a_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")

# every method by name, as `coterie run --method NAME` would build it
METHODS: dict[str, Callable[[], AnyAlgorithm]] = {
    **ALGORITHMS,
    **{
        name: lambda base=base, adapt=adapt: Adapted(ALGORITHMS[base](), ADAPTATIONS[adapt]())
        for name, (base, adapt) in ALIASES.items()
    },
}

OPEN: list[Any] = []  # engines of this test
RAGGED = (31, 17, 24, 9, 40)  # no two alike, one shorter than a batch of 10
RECIPE = Recipe(lr=0.1, epochs=2, batch=10, momentum=0.5, weight_decay=1e-3)


def images(samples: int, classes: int = 3, seed: int = 0) -> Dataset:
    """Classes that are noisy versions of random 6 × 6 pictures."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % classes
    centre = torch.randn(classes, 1, 6, 6, generator=generator)
    x = centre[y] + 0.7 * torch.randn(samples, 1, 6, 6, generator=generator)
    return Dataset("toy", x.float(), y, classes)


def federation(
    sizes: tuple[int, ...] = RAGGED, groups: int = 2, order: list[int] | None = None
) -> Federation:
    """Ragged clients; odd and even ones read the labels differently."""
    val, test = 6, 7
    data = images(sum(sizes) + len(sizes) * (val + test))
    shuffled = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(1))
    parts, start = [], 0
    for size in sizes:
        cuts = shuffled[start : start + size + val + test].split([size, val, test])
        parts.append(cuts)
        start += size + val + test
    group = torch.arange(len(sizes)) % groups
    relabel = torch.stack([torch.arange(3).roll(int(g)) for g in group])
    order = list(range(len(sizes))) if order is None else order
    return Federation(
        data,
        "ragged",
        tuple(f"site {i}" for i in order),
        *(tuple(parts[i][split] for i in order) for split in range(3)),
        groups=group[order],
        relabel=relabel[order],
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Module:
    """With batch norm: the vector has buffers behind the parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


def task(
    algorithm: AnyAlgorithm,
    factory: Callable[[], nn.Module] = mlp,
    federated: Federation | None = None,
    recipe: Recipe = RECIPE,
    merge: bool | None = None,
    **options: Any,
) -> Simulation:
    """The ragged federation in float64; ``merge`` overrides what the method asks for."""
    options.setdefault("dtype", torch.float64)
    return simulate(
        federation() if federated is None else federated,
        factory,
        recipe,
        merge_val=not algorithm.traits.uses_validation if merge is None else merge,
        sharing=algorithm.traits.sharing,
        **options,
    )


def engine_of(name: str, on: Simulation, *, rounds: int = 1, **options: Any) -> Any:
    """An engine for a simulation; it is closed when the test ends."""
    settings = EngineSettings(name, **options)
    made: Any = make_engine(settings, on.problem, on.shards, Length(rounds))
    OPEN.append(made)
    return made


def slower(made: Any) -> list[str]:
    """Why calls of a backend or of its executor were not replayed, or not compiled."""
    return [form.why for form in made.forms if form.why]


def backend_of(name: str, on: Simulation, **options: Any) -> Any:
    """What computes the client half of a simulation."""
    if name == "vmap":
        options = {"chunk": 20, "trace": False, **options}
        return VmapBackend(on.problem, on.shards, **options)
    return LoopBackend(on.problem, on.shards, **options)


def last(
    algorithm: AnyAlgorithm,
    on: Simulation,
    engine: str = "vmap",
    rounds: int = 3,
    chunk: int | None = None,
    **options: Any,
) -> Record:
    """The last record of a run; other rounds are not evaluated, which changes nothing."""
    options = {"participation": 0.5, "evaluate_every": rounds, **options}
    made = engine_of(engine, on, chunk=chunk)
    *_, record = train(algorithm, on.problem, made, rounds, **options)
    return record


def predictors(record: Record) -> Mixture:
    assert record.mixture is not None
    return record.mixture


def one_client(on: Simulation, client: int, round_index: int = 0) -> Client:
    """One client as the reference engine makes it."""
    view = row(views(on.problem, on.shards, [client], round_index), 0)
    shape = shape_of(on.shards, [client], batched=False)
    return Client(on.problem, on.shards, view, shape, Clock(round_index, 10))


def whole_round(on: Simulation, index: int = 0, horizon: int = 10) -> Any:
    return round_of(on.problem, index, horizon, torch.arange(on.problem.population))


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class NormedDigits(nn.Sequential):
    """The same for the digits of scikit-learn, by name in a config."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def cards_home(folder: Path, monkeypatch: Any, **texts: str) -> Path:
    """A folder ``experiments`` with these cards of P1, beside which the test then runs."""
    home = folder / "experiments"
    (home / "p1").mkdir(parents=True)
    for name, text in texts.items():
        (home / "p1" / f"{name}.toml").write_text(text)
    monkeypatch.setenv("COTERIE_CARDS", str(home))
    monkeypatch.chdir(folder)
    return home
