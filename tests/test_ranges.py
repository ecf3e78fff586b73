"""Every numeric field has a range; what lies outside is refused, what lies inside runs.

The expectation is written anew here, from the annotations alone: :func:`inside` knows nothing of
pydantic. A method, adaptation, partition or network that is registered later is tested too.
"""

import math
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from types import UnionType
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Interval, MinLen

import coterie
from coterie.adapt import ADAPTATIONS, Adapted, FreezeBase
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.mocha import Mocha
from coterie.algorithms.pafl import PaFL
from coterie.algorithms.waffle import Waffle
from coterie.commands.catalog import explanation
from coterie.core.algorithm import check_run
from coterie.core.fields import Checked, Field, checked, fields
from coterie.core.optim import Recipe
from coterie.core.ranges import Meaning
from coterie.data.datasets import DATASETS, FORMATS, SOURCES
from coterie.data.datasets import load as load_data
from coterie.data.federation import Dataset
from coterie.data.partition import PARTITIONS
from coterie.data.partitions.labels import Dirichlet, Group
from coterie.errors import ConfigError, CoterieError
from coterie.networks.registry import MODELS, factory
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load
from support import federation, last, task

MADE_HERE = {name: entry.loader for name, entry in DATASETS.items() if name not in SOURCES}
OWNERS: dict[str, Callable[..., Any]] = {
    f"{kind} {name}": owner
    for kind, table in {
        "method": ALGORITHMS,
        "adaptation": ADAPTATIONS,
        "partition": PARTITIONS,
        "model": MODELS,
        "dataset": MADE_HERE,
        "reader": {name: entry.owner or entry.reader for name, entry in FORMATS.items()},
        "row": {"practical_groups": Group},
    }.items()
    for name, owner in table.items()
}
FIELDS = [
    (owner, field)
    for owner, kind in OWNERS.items()
    for field in fields(kind)
    if field.name not in ("path", "name")
]
NEEDED = {"row practical_groups": {"clients": 1, "classes": (0,), "train": 1, "test": 1}}
every_field = pytest.mark.parametrize(
    ("owner", "field"), FIELDS, ids=[f"{owner}.{field.name}" for owner, field in FIELDS]
)
# counts that cost nothing when they are large; of all others only small ones are run
CHEAP = ("downloads", "omega_every", "t_min")
CHEAP += ("requesters", "global_layers", "head", "seed", "clients", "samples", "features")
ODD = (
    *(math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, -(10**12), -1, 0, 1, 2, 0.5, -1e-9),
    *(True, None, "no such word", "", object, {}, {"a": 1}, (), [], (-1,), (0,), [1], (0.5,)),
    *((math.nan,), ("no such word",), (True,), ((),)),
)


def parts_of(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type, None aside."""
    union = typing.get_origin(kind) in (typing.Union, UnionType)
    return tuple(p for p in typing.get_args(kind) if p is not type(None)) if union else (kind,)


def limits_of(kind: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and these."""
    if typing.get_origin(kind) is Annotated:
        base, *limits = typing.get_args(kind)
        return base, [limit for limit in limits if not isinstance(limit, Meaning)]
    return kind, []


def within(value: float, limit: Interval) -> bool:
    above = limit.ge is None or value >= limit.ge
    below = limit.le is None or value <= limit.le
    strictly_above = limit.gt is None or value > limit.gt
    return above and below and strictly_above and (limit.lt is None or value < limit.lt)


def inside(value: Any, kind: Any) -> bool:
    """Whether a field of this type may have this value."""
    if value is None:
        return type(None) in typing.get_args(kind)
    if len(parts_of(kind)) > 1 or type(None) in typing.get_args(kind):
        return any(inside(value, part) for part in parts_of(kind))
    base, limits = limits_of(kind)
    if typing.get_origin(base) is Literal:
        return any(
            value == choice and type(value) is type(choice) for choice in typing.get_args(base)
        )
    if typing.get_origin(base) in (tuple, Sequence):
        least = max((limit.min_length for limit in limits if isinstance(limit, MinLen)), default=0)
        listed = isinstance(value, tuple | list) and len(value) >= least
        return listed and all(inside(part, typing.get_args(base)[0]) for part in value)
    if base is float and type(value) in (int, float):
        finite = abs(value) < 1e308 and math.isfinite(value)
        return finite and all(within(value, limit) for limit in limits)
    if base is int and type(value) is int:
        return all(within(value, limit) for limit in limits)
    if typing.get_origin(base) is not None:
        return callable(value)
    return type(value) is base and base in (bool, str)


def numbers_in(kind: Any) -> Iterator[tuple[Any, list[Any], Callable[[Any], Any]]]:
    """Every number in a type, its annotations, and how a value of the field is made of one."""
    for part in parts_of(kind):
        base, limits = limits_of(part)
        if base in (int, float):
            yield base, limits, lambda value: value
        elif typing.get_origin(base) is tuple:
            for inner, found, make in numbers_in(typing.get_args(base)[0]):
                yield inner, found, lambda value, make=make: (make(value),)
        elif is_dataclass(base):
            hints = typing.get_type_hints(base, include_extras=True)
            for field in dataclass_fields(base):
                yield from numbers_in(hints[field.name])


def ends_of(kind: Any) -> Iterator[Any]:
    """Values at both ends of every range of a type, and just outside."""
    for base, limits, make in numbers_in(kind):
        for limit in limits:
            for end in (limit.ge, limit.gt, limit.le, limit.lt):
                if end is not None:
                    step = 1 if base is int else max(abs(end) * 1e-9, 1e-12)
                    yield from (make(base(v)) for v in (end - step, end, end + step))


@every_field
def test_every_number_has_a_range(owner, field):
    for base, limits, _ in numbers_in(field.type):
        bounded = [limit for limit in limits if isinstance(limit, Interval)]
        assert bounded, (
            f"{owner}: annotate {field.name}: {base.__name__} with one of coterie.core.ranges"
        )
        for limit in bounded:
            assert (limit.ge, limit.gt) != (None, None)
            assert (limit.le, limit.lt) != (None, None)


@every_field
def test_every_field_has_a_meaning(owner, field):
    assert field.meaning, f"{owner}: say in the docstring what {field.name} means"


@every_field
def test_what_is_outside_is_refused_and_what_is_inside_is_not(owner, field):
    kind, needed = OWNERS[owner], NEEDED.get(owner, {})
    for value in (*ODD, *ends_of(field.type)):
        allowed = inside(value, field.type)
        if not callable(value) and not isinstance(value, dict):
            assert (
                fits(lambda v=value: checked({field.name: v}, [field], "there", owner)) == allowed
            )
        if is_dataclass(kind):
            made = fits(
                lambda v=value: kind(**{**needed, field.name: v}), f": found {value!r}; expected"
            )
            assert made == allowed, f"{owner}.{field.name} = {value!r}"


def fits(make: Callable[[], Any], words: str = ": found") -> bool:
    """Whether nothing is refused in these words; what is refused together with others has other."""
    try:
        make()
    except ConfigError as error:
        return words not in str(error)
    return True


@pytest.mark.parametrize("owner", [o for o, kind in OWNERS.items() if is_dataclass(kind)])
def test_nothing_gets_around_the_check(owner):
    """``check_together`` is where a class refuses combinations; its fields are checked before."""
    assert OWNERS[owner].__post_init__ is Checked.__post_init__


@dataclass(frozen=True)
class Plain(Checked):
    """A user's own class, whose number has no range."""

    rate: float = 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1"])
def test_a_number_without_a_range_is_finite(value):
    assert Plain(-1e300) == Plain(rate=-1e300)
    with pytest.raises(ConfigError, match=r"Plain\.rate: found .*; expected a number"):
        Plain(value)


def test_python_and_configs_are_refused_in_the_same_words():
    for kind, given, where in (
        (FedAMP, {"sigma": -5}, "algorithm.fedamp.sigma"),
        (FedAMP, {"lam": math.inf}, "algorithm.fedamp.lam"),
        (Dirichlet, {"alpha": -1.0}, "partition.alpha"),
    ):
        ((name, value),) = given.items()
        with pytest.raises(ConfigError) as python:
            kind(**given)
        with pytest.raises(ConfigError) as config:
            checked(given, fields(kind), where.rpartition(".")[0], "x")
        assert str(python.value).startswith(f"{kind.__name__}.{name}: found {value}; expected")
        assert str(python.value).partition(": ")[2] == str(config.value).partition(": ")[2]
        field = next(field for field in fields(kind) if field.name == name)
        assert field.kind in str(config.value)
        assert field.meaning.rstrip(".") in str(config.value)


def test_show_prints_ranges():
    shown = explanation(["methods", "fedamp"])
    assert "sigma_factor (a number above 0 and at most 1e9; default 0.1)" in shown
    assert "alpha (a number from 0 to 1e9 or 'auto' or 'theory'; default 'auto')" in shown
    assert "fraction (a number above 0 and at most 1; " in explanation(
        ["partition", "label_groups"]
    )
    assert "hidden (a list of whole numbers from 1 to 100000; " in explanation(["model", "mlp"])
    assert (
        "requesters (a list of whole numbers from 0 to 1e9, at least one, or 'all'"
        in explanation(["waffle"])
    )


# ---- what is inside runs -------------------------------------------------------------------------


# other fields without which a field has no effect
ACTIVE: dict[str, dict[str, Any]] = {
    "method fedamp.lam": {"alpha": 1.0},
    "method ifca.k": {"start": "redraw"},
    "method ifca.start": {"k": 2},
    "method ifca.min_share": {"k": 2, "start": "redraw"},
    "method ifca.draws": {"k": 2, "start": "redraw"},
    "method mocha.omega_every": {"omega": "learned"},
    "method mocha.floor": {"omega": "learned"},
    "method pafl.lam": {"personal": "ewc"},
    "method perfedavg.delta": {"form": "hf"},
    "method cfl.eps1": {"eps_mode": "absolute", "t_min": 0},
    "method cfl.eps2": {"eps_mode": "absolute", "t_min": 0},
    "method cfl_mean.allies": {"t_min": 0},
}


def runnable(field: Field) -> list[Any]:
    """Every choice, and the ends of every range; of a costly count the smallest ones."""
    found = [True, False] if field.type is bool else []
    for part in parts_of(field.type):
        if typing.get_origin(part) is Literal:
            found += typing.get_args(part)
    for below, end, above in zip(*[ends_of(field.type)] * 3, strict=True):
        inner = [value for value in (end, above, below) if inside(value, field.type)]
        if field.name in CHEAP or not any(map(large_count, inner)):
            found += inner[:1]
    return found


def large_count(value: Any) -> bool:
    value = value[0] if isinstance(value, tuple) else value
    return type(value) is int and value > 3


SMALL = federation((12, 9, 14))
BRIEF = Recipe(lr=0.1, epochs=1, batch=20)  # one step a round
METHOD_FIELDS = [(o, f) for o, f in FIELDS if o.split()[0] in ("method", "adaptation")]


@pytest.mark.parametrize(
    ("owner", "field"), METHOD_FIELDS, ids=[f"{o}.{f.name}" for o, f in METHOD_FIELDS]
)
def test_methods_run_at_the_ends_of_their_ranges(owner, field):
    kind = OWNERS[owner]
    for value in runnable(field):
        with suppress(ConfigError):  # nothing else may come of it
            others = ACTIVE.get(f"{owner}.{field.name}", {})
            made = kind(**{**others, field.name: value})
            method = Adapted(FedAvg(), made) if owner.startswith("adaptation") else made
            on = task(method, federated=SMALL, recipe=BRIEF)
            last(method, on, "loop", rounds=2, evaluate_every=2, participation=1.0)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    place = tmp_path_factory.mktemp("embedding") / "digits.npy"
    np.save(place, np.random.default_rng(0).normal(size=(1797, 4)).astype(np.float32))
    return str(place)


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_deal_or_refuse_at_the_ends_of_their_ranges(name, embedding):
    base = {"embedding": embedding} if name == "latent" else {}
    for field in fields(PARTITIONS[name]):
        for value in runnable(field):
            given = {"name": name, "clients": 6, **base, field.name: value}
            if name in ("waffle", "natural"):
                del given["clients"]
            config = {"data": {"name": "digits"}, "partition": given, "model": {"name": "linear"}}
            with suppress(CoterieError):
                assemble(load(config))


@pytest.mark.parametrize("name", MODELS)
def test_models_build_or_refuse_at_the_ends_of_their_ranges(name):
    texts = name.endswith("lstm")
    x = torch.arange(8).view(2, 4) if texts else torch.zeros(2, 1, 32, 32)
    data = Dataset("tiny", x, torch.zeros(2, dtype=torch.int64), classes=3)
    for field in fields(MODELS[name]):
        for value in runnable(field):
            with suppress(CoterieError):
                factory(name, data, **{field.name: value})()(x)


@pytest.mark.parametrize("name", MADE_HERE)
def test_data_is_made_or_refused_at_the_ends_of_its_ranges(name):
    for field in fields(MADE_HERE[name]):
        for value in runnable(field):
            with suppress(CoterieError):
                load_data(name, **{field.name: value})


@pytest.mark.parametrize("given", [{"length": 0}, {"stride": -1}, {"length": "x"}, {"part": 3}])
def test_options_of_a_file_are_checked_before_it_is_read(given, tmp_path):
    (tmp_path / "one.txt").write_text("abc" * 100)
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"data.{name}: found {value!r}"):
        load_data(str(tmp_path), **given)


# ---- what depends on the run ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("lr", [0.01, 0.2, 1.0])
def test_no_default_is_refused(name, lr):
    method = ALGORITHMS[name]()
    check_run(method, task(method, federated=SMALL, recipe=replace(BRIEF, lr=lr)).problem, 500)


LATER = {
    "a pull": (FedProx(mu=20.0), r"fedprox\.mu: .* expected below 2"),
    "a pull to the mixture": (FedAMP(prox=20.0), r"fedamp\.prox: .* expected below 2"),
    "a pull to the mean": (Mocha(lam1=20.0), "must stay below 2"),
    "decay of all": (Mocha(lam2=10.0, omega="learned"), "must stay below 2"),
    "a requester": (Waffle(requesters=(3,)), "numbers from 0 to 2"),
    "a layer": (FedPer(head=("heat",)), "no layer 'heat'"),
    "a layer to train": (Adapted(FedAvg(), FreezeBase(fb_trainable=("heat",))), "no layer 'heat'"),
    "a schedule of one's own": (
        PaFL(schedule=lambda t, horizon: (1.0 if t < 100 else 1.5, "kd")),
        "μ = 1.5 in round 100",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_what_must_break_later_is_refused_before_round_0(case):
    method, words = LATER[case]
    with pytest.raises(ConfigError, match=words):
        last(method, task(method, federated=SMALL, recipe=BRIEF), "loop", rounds=200)


def test_a_pull_may_be_as_strong_as_the_rate_allows():
    """Steps on a quadratic alone shrink below the bound and grow above it."""
    for momentum, limit in ((0.0, 2.0), (0.5, 3.0)):
        recipe = replace(BRIEF, momentum=momentum)
        for factor, fine in ((0.99, True), (1.01, False)):
            method = FedProx(mu=factor * limit / recipe.lr)
            on = task(method, federated=SMALL, recipe=recipe)
            assert fits(lambda m=method, t=on: m.check(t.problem, 10), "fedprox.mu: found") == fine
            x, speed = 1.0, 0.0
            for _ in range(4000):
                speed = momentum * speed + method.mu * x
                x -= recipe.lr * speed
            assert (abs(x) < 1) == fine


def test_adam_has_no_such_bound():
    method = FedProx(mu=100.0)
    method.check(task(method, federated=SMALL, recipe=replace(BRIEF, optimizer="adam")).problem, 10)


def test_a_learning_rate_that_reaches_zero_is_refused():
    method, fading = FedAvg(), replace(BRIEF, decay=1e-5)
    with pytest.raises(ConfigError, match=r"train\.decay: found 1e-05"):
        check_run(method, task(method, federated=SMALL, recipe=fading).problem, 100)
    check_run(method, task(method, federated=SMALL, recipe=fading).problem, 10)
    check_run(
        method, task(method, federated=SMALL, recipe=replace(fading, floor=1e-3)).problem, 100
    )


# ---- from the command line -----------------------------------------------------------------------

REFUSED = {
    "heurfedamp.self_weight=2": "expected a number from 0 to 1 or 'auto'",
    "fedamp.prox=20": "expected below 2",
    "waffle.requesters=[12]": "different numbers from 0 to 11",
    "fedper.head=['heat']": "no layer 'heat'",
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_command_ends_with_code_2_before_anything_is_written(told, tmp_path, command):
    method, out = told.partition(".")[0], tmp_path / "out"
    code, _, err = command("run", "--method", method, "--out", out, "--set", f"algorithm.{told}")
    assert code == 2
    assert REFUSED[told] in " ".join(err.split())
    assert not out.exists()


def test_a_comparison_is_refused_before_its_first_method_is_trained(tmp_path):
    seen = []
    with pytest.raises(ConfigError, match=r"fedprox\.mu"):
        coterie.compare(
            methods=["fedavg", "fedprox"],
            rounds=1,
            set={"algorithm.fedprox.mu": 100.0},
            out=str(tmp_path / "out"),
            progress=seen.append,
        )
    assert seen == []
    assert not (tmp_path / "out").exists()
