"""The files of an exported model, and what they say about it."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..core.imports import Code
from ..data.data_schema import Schema
from ..networks import registry
from ..storage import files
from ..storage.files import STRICT

FORMAT = 1
MODEL, CONFIG, PREPROCESSING = "model.safetensors", "config.json", "preprocessing.json"
CARD = "README.md"
NAMES = (MODEL, CONFIG, PREPROCESSING, CARD)
MOST_MODELS = 10_000  # of one mixture
WEIGHTS = "weights"  # of the mixture, in the file of the model


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model: where it comes from, on which data, and how good it is."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    client: str
    method: str
    rounds: int
    seed: int
    run: str  # digest of the run, or hash of the agreement of a federation's sites
    data: str | None  # fingerprint of the clients' data; None where a site does not know it
    train: int  # samples of the client
    val: int
    test: int
    metric: str
    score: float | None  # on the client's test samples; None if it has none
    collaborators: dict[str, float | None]  # others, and the weight that the client gives them
    notes: tuple[str, ...] = ()
    onboarded: bool = False  # the client was not in the run: it joined the finished one


@dataclass(frozen=True)
class NetworkFacts:
    """The network of a model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    options: dict[str, Any]
    shape: tuple[int, ...]  # of one input
    classes: int  # 0 for a regression
    precision: Literal["float32", "float64", "tf32", "bf16"]

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32


@dataclass(frozen=True)
class ExportConfig:
    """The file ``config.json`` of an export."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    network: NetworkFacts
    model: ModelFacts
    digest: str  # of the weights and parameters
    coterie: str  # the version that wrote it
    format: int = field(default=FORMAT, kw_only=True)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return files.to_json(asdict(self), indent=2) + "\n"


def network_factory(facts: NetworkFacts, schema: Schema, code: Code) -> Callable[[], nn.Module]:
    """A function that makes such networks for samples of this schema."""
    own = facts.name in registry.MODELS
    model = facts.name if own else registry.builder(facts.name, code)
    return registry.factory(model, schema.example(), **facts.options)


def shapes_of(facts: NetworkFacts, factory: Callable[[], nn.Module]) -> nn.Module:
    """A network without values: our own networks take no memory for it, however large they are."""
    with torch.device("meta") if facts.name in registry.MODELS else contextlib.nullcontext():
        return factory()
