"""The registry of networks by name, and the default network for a kind of data.

A builder takes the shape of one sample, the number of classes (0 means regression, one output) and
its options, and returns a new module. Every network ends in a layer called ``head``. No network
works in place or keeps state between calls, so that ``vmap`` can map it over a stack of parameters;
the LSTMs are the exception and need the ``loop`` engine.

P4's DLA is not here: ``resnet18`` replaces it. Dropout is ``nn.Dropout``, whose masks training
derives from the run's seed.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.fields import checked, fields
from ..core.imports import INSTALLED_ONLY, Code, imported
from ..errors import ConfigError, did_you_mean
from .architectures import (
    char_lstm,
    fedavg_cnn,
    fomo_code_cnn,
    leaf_cnn,
    lenet5,
    linear,
    mlp,
    next_token_lstm,
    p2_cnn,
    resnet18,
    vgg11,
    word_lstm,
)

Builder = Callable[..., nn.Module]
_TINY = 16  # pixels per side; smaller images get no convolutions


class Samples(Protocol):
    """The properties of a dataset that a network needs."""

    @property
    def name(self) -> str:
        """The dataset's name, for messages."""

    @property
    def x(self) -> Tensor:
        """The samples ``[N, ...]``; int64 are tokens."""

    @property
    def y(self) -> Tensor:
        """The targets ``[N]``, or ``[N, T]`` with a target at every position."""

    @property
    def classes(self) -> int:
        """The number of classes; 0 means regression."""


MODELS: dict[str, Builder] = {
    "linear": linear,
    "mlp": mlp,
    "lenet5": lenet5,
    "fedavg_cnn": fedavg_cnn,
    "leaf_cnn": leaf_cnn,
    "p2_cnn": p2_cnn,
    "fomo_code_cnn": fomo_code_cnn,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "char_lstm": char_lstm,
    "word_lstm": word_lstm,
    "next_token_lstm": next_token_lstm,
}


def default(dataset: Samples) -> str:
    """The default network for the data: table or tiny image, grey image, colour image, text."""
    shape = dataset.x.shape[1:]
    if dataset.y.ndim > 1:
        return "next_token_lstm"
    if dataset.x.dtype == torch.int64:
        return "char_lstm" if dataset.classes <= 256 else "word_lstm"
    if len(shape) != 3 or min(shape[1:]) < _TINY:
        return "mlp"
    return "lenet5" if shape[0] == 1 else "fedavg_cnn"


def factory(model: str | Builder, dataset: Samples, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes new modules for this data.

    ``model`` is a name, a builder, or "auto" for the default network of the kind of data.

    >>> from types import SimpleNamespace
    >>> table = SimpleNamespace(name="t", x=torch.zeros(3, 4), y=torch.zeros(3), classes=2)
    >>> [type(layer).__name__ for layer in factory("auto", table)()]
    ['Sequential', 'Linear']
    """
    model = default(dataset) if model == "auto" else model
    build = builder(model) if isinstance(model, str) else model
    if model in MODELS:
        options = checked(options, fields(build), "model", str(model))
    given: dict[str, Any] = {"shape": tuple(dataset.x.shape[1:]), "classes": dataset.classes}
    if dataset.x.dtype == torch.int64:
        given["vocabulary"] = int(dataset.x.max()) + 1
    wanted = inspect.signature(build).parameters
    told = {key: value for key, value in options.items() if value is not None}
    if told.get("vocabulary", math.inf) < given.get("vocabulary", 0):
        raise ConfigError(
            f"model.vocabulary: found {told['vocabulary']}, but {dataset.name} has "
            f"{given['vocabulary']} different tokens; expected at least that many, or leave it out"
        )
    options = {**{key: given[key] for key in given if key in wanted}, **told}
    return lambda: build(**options)


def in_bfloat16(make: Callable[[], nn.Module], device_type: str) -> Callable[[], nn.Module]:
    """Let the networks compute in bfloat16; parameters and outputs stay float32."""

    def half() -> nn.Module:
        module = make()
        plain = type(module)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast(device_type, torch.bfloat16):
                scores: Tensor = plain.forward(self, x)
            return scores.float()

        module.__class__ = type(f"Half{plain.__name__}", (plain,), {"forward": forward})
        return module

    return half


def builder(name: str, code: Code = INSTALLED_ONLY) -> Builder:
    """The builder for a name in MODELS or for a user's ``nn.Module`` (``package.module:Class``).

    A user's class is called with the other keys of ``[model]``; parameters that it calls ``shape``
    and ``classes`` are filled in from the data.
    """
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        known = did_you_mean(name, ["auto", *MODELS, "package.module:Class"])
        raise ConfigError(f"model.name: no model is called '{name}'; {known}")
    return imported(name, nn.Module, "model.name", code)
