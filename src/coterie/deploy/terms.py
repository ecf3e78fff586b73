"""What the sites of a federation are asked for, and what they agree to: texts known by a sha256.

A :class:`Request` says what the owner of a site is asked to approve: which methods, for how many
rounds, with whom. Then the coordinator writes an :class:`Agreement` for each experiment and every
site checks it: the config without anything that is a site's own or the coordinator's own, the
clients with their counts, the common schema and the moments that inputs are standardised by. Both
sides then make the same problem and the same method from it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from ..core.algorithm import AnyAlgorithm, check_run
from ..core.fields import Checked
from ..core.imports import Code
from ..core.policies import governed
from ..core.problem import Counts, Problem
from ..data.data_schema import Schema
from ..data.standard import Moments, checked_moments
from ..errors import ConfigError, EngineError
from ..networks import registry
from ..runs.assemble import factory_of
from ..runs.config.loading import canonical, load
from ..runs.config.schema import Config
from ..runs.run import LOCAL
from ..storage.files import parsed, strict

OWN = ("engine", "guard")  # tables of the coordinator's config that do not concern the sites
SHARED_RUN = ("rounds", "seed", "deal", "participation", "metric", "folds", "fold")
SHARED_DATA = ("scale",)  # fields of [data] that all sites have to share


Count = Annotated[int, Field(ge=0, le=10**12)]
Plain = Annotated[str, Field(pattern=r"^[ -~]{1,100}$")]  # what may be shown and stored
Sites = Annotated[tuple[Plain, ...], Field(min_length=1, max_length=10_000)]
Many = Annotated[int, Field(ge=1, le=10**9)]


@strict
class SiteCounts:
    """The samples that one site declares."""

    train: Count
    val: Count
    test: Count


@strict
class Request:
    """What a coordinator asks the owners of sites to approve: the experiments of one config."""

    federation: str
    clients: Sites
    methods: Sites
    rounds: Many  # of one experiment
    epochs: Many  # of one round, by the method that trains most
    folds: Annotated[int, Field(ge=2, le=1000)] | None = (
        None  # in which every row tests once and trains in the others
    )
    sealed: bool = False  # whether sites seal models for each other, see coterie.deploy.peers

    def to_json(self) -> str:
        """The request as JSON: the same text for the same request."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Read a request that another machine sent; refuses whatever is none."""
        return parsed(text, cls, "request")

    @property
    def id(self) -> str:
        """The sha256 of the request, by which its owner approves it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def request_of(
    config: Config, federation: str, clients: tuple[str, ...], *, sealed: bool
) -> Request:
    """The request for all runs of a config."""
    methods = config.methods() if config.run.methods else ()
    named = {method.name: method for method in (config.method(), *methods)}
    asked = [config.single(method, config.run.seed) for method in named.values()]
    for one in asked:
        refuse_sharing(one.method().build())
    return Request(
        federation,
        clients,
        tuple(sorted({*named} | (set() if sealed else {LOCAL}))),
        config.run.rounds,
        max(max(one.train.epochs, most_passes(one.method().build())) for one in asked),
        config.run.folds,
        sealed,
    )


def refuse_sharing(method: AnyAlgorithm) -> None:
    """Refuse a method that needs raw samples of the sites."""
    if method.traits.sharing is not None:
        raise ConfigError(
            f"algorithm: {type(method).__name__} sends raw samples of every site to all others; "
            "they do not leave a real site; choose another method, or simulate it"
        )


def most_passes(method: Checked) -> int:
    """The passes over a client's data that a method's own fields ask for, and those within it.

    A step counts as a pass: it is at most one.
    """
    own = [
        value
        for name, value in vars(method).items()
        if name.endswith(("epochs", "passes", "steps")) and isinstance(value, int)
    ]
    return max([0, *own, *map(most_passes, method.within)])


@strict
class Agreement:
    """The terms of one experiment. No two experiments have the same ``nonce``."""

    request: str  # the id of the request that it is a part of
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    config: Annotated[str, Field(max_length=2**14)]  # the tables of one run, as JSON
    clients: Sites
    counts: tuple[SiteCounts, ...]  # one entry per client
    schema: Schema
    moments: Moments | None
    kept: Annotated[
        int, Field(ge=2, le=10_000)
    ]  # states that a site keeps, so that the coordinator can resume from a checkpoint
    sealed: bool = False

    def to_json(self) -> str:
        """The agreement as JSON: the same text for the same agreement."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Agreement":
        """Read an agreement that another machine sent; refuses whatever is none."""
        found = parsed(text, cls, "agreement")
        if not len({*found.clients}) == len(found.clients) == len(found.counts):
            raise EngineError("agreement: found a name twice, or not a count for each name")
        if found.moments is not None:
            checked_moments(found.moments)
        return found

    @property
    def hash(self) -> str:
        """The sha256 of the terms, which every message of the experiment carries.

        The request is none of them: another approved one may go on with the experiment.
        """
        return hashlib.sha256(replace(self, request="").to_json().encode()).hexdigest()


def shared_config(config: Config) -> str:
    """The tables of one run that the sites have to know, as JSON."""
    tables = canonical(config)
    tables["data"] = {name: tables["data"][name] for name in SHARED_DATA}
    for own in (*OWN, "partition"):
        tables.pop(own, None)
    run = tables["run"]
    tables["run"] = {name: run[name] for name in SHARED_RUN if name in run}
    return json.dumps(tables, sort_keys=True)


class Experiment(NamedTuple):
    """An agreement in working order: the method and the problem that it describes."""

    agreement: Agreement
    config: Config
    algorithm: AnyAlgorithm
    problem: Problem
    merged: bool  # whether validation data is trained on


def experiment_of(
    agreement: Agreement,
    code: Code,
    *,
    most_bytes: int,
    secret: Callable[[Config], bytes] | None = None,
) -> Experiment:
    """The method and the problem of an agreement.

    Code that the config names is imported only from the places ``code``; a model larger than
    ``most_bytes`` is refused before it is built. ``secret`` is what a site draws its noise from.
    """
    config = load(_tables(agreement.config), code=code)
    algorithm = config.method().build()
    _check_size(config, agreement.schema, most_bytes)
    factory = factory_of(config, agreement.schema.example())
    declared = Declared(agreement.clients, agreement.counts, agreement.schema)
    key = None if secret is None else secret(config)
    problem = problem_of(config, algorithm, declared, factory, secret=key)
    check_run(algorithm, problem, config.run.rounds)
    merged = merges_validation(config, algorithm)
    return Experiment(agreement, config, governed(algorithm, problem), problem, merged)


class Declared(NamedTuple):
    """What the sites declare of themselves and their data."""

    clients: tuple[str, ...]
    counts: tuple[SiteCounts, ...]
    schema: Schema


def problem_of(
    config: Config,
    algorithm: AnyAlgorithm,
    declared: Declared,
    factory: Callable[[], nn.Module],
    *,
    secret: bytes | None = None,
) -> Problem:
    """The problem of one run, as a server and its sites know it."""
    example = declared.schema.example()
    return Problem(
        clients=declared.clients,
        counts=counts_of(declared.counts, merged=merges_validation(config, algorithm)),
        factory=factory,
        recipe=config.train.recipe(),
        classes=example.classes,
        shape=example.x.shape[1:],
        stored=example.x.dtype,
        seed=config.run.seed,
        dtype=torch.float64 if config.train.precision == "float64" else torch.float32,
        secret=secret,
        privacy=config.agreed_privacy,
    )


def merges_validation(config: Config, algorithm: AnyAlgorithm) -> bool:
    """Whether clients train on their validation data as well."""
    return config.train.merge_val and not algorithm.traits.uses_validation


def _tables(text: str) -> dict[str, Any]:
    """The tables of an agreement's config; refuses tables that are a site's own."""
    try:
        tables = json.loads(text)
        data, run = tables.get("data", {}), tables.get("run", {})
        own = {*tables} & {*OWN, "partition"} | ({*data} - {*SHARED_DATA})
        own |= {*run} - {*SHARED_RUN}
        own |= {*tables.get("model", {})} & {"weights"}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"agreement.config: is no config ({error}); expected tables") from error
    if own:
        raise ConfigError(
            f"agreement.config: found {', '.join(sorted(map(str, own)))}, which the coordinator "
            "cannot set at a site; expected the model, the training and the method alone"
        )
    return dict(tables)


def _check_size(config: Config, schema: Schema, most_bytes: int) -> None:
    """Refuse a network that is too large, without memory for it."""
    build = registry.builder(config.model.name, config.code)
    make = registry.factory(build, schema.example(), **config.model.options)
    with torch.device("meta"):
        module = make()
    size = sum(part.numel() * part.element_size() for part in module.parameters())
    if size > most_bytes:
        raise ConfigError(
            f"model: found a network of {size:,} bytes; expected at most {most_bytes:,}, this "
            "site's limit for a message ([limits] message_mib in site.toml)"
        )


def counts_of(counts: tuple[SiteCounts, ...], *, merged: bool) -> Counts:
    """The counts of a problem, as :func:`coterie.data.simulation.simulate` declares them."""
    train = tuple(one.train + one.val if merged else one.train for one in counts)
    return Counts(
        train=train,
        val=tuple(one.val or own for one, own in zip(counts, train, strict=True)),
        validated=tuple(one.val > 0 and not merged for one in counts),
    )
