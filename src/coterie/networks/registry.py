"""The networks by name, and the default network for a kind of data.

A builder takes the shape of one sample, the number of classes (0 means regression, one output) and
its options, and returns a new module. Every network ends in a layer called ``head``. No network
works in place or keeps state between calls, so that ``vmap`` can map it over a stack of parameters;
the LSTMs are the exception and need the ``loop`` engine.

P4's DLA is not here: ``resnet18`` replaces it. Dropout is ``nn.Dropout``, whose masks training
derives from the run's seed.
"""

import copy
import hashlib
import inspect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..core.fields import checked, fields
from ..core.imports import INSTALLED_ONLY, Code, imported
from ..core.ranges import Interval
from ..errors import ConfigError, did_you_mean

Builder = Callable[..., nn.Module]
_TINY = 16  # pixels per side; smaller images get no convolutions
Shape = tuple[int, ...]  # of one sample
Width = Annotated[int, Interval(ge=1, le=100_000)]


def convolution(inputs: int, outputs: int, kernel: int, pad: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=pad), nn.ReLU()]


def with_dense(
    body: list[nn.Module], shape: Shape, hidden: tuple[int, ...], classes: int
) -> nn.Module:
    """Convolutions, then fully connected layers whose input width fits the convolutions' output."""
    features = nn.Sequential(*body, nn.Flatten())
    with torch.no_grad():
        width = features(torch.zeros(1, *shape)).shape[1]
    layers: list[nn.Module] = []
    for outputs in hidden:
        layers += [nn.Linear(width, outputs), nn.ReLU()]
        width = outputs
    return chain(features=features, body=nn.Sequential(*layers), head=head(width, classes))


def chain(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def head(inputs: int, classes: int) -> nn.Linear:
    """The last layer: a score for each class, or one value for a regression."""
    return nn.Linear(inputs, classes or 1)


def image_shape(name: str, shape: Shape, least: int) -> Shape:
    """The shape of one sample; refuses all but images of at least ``least`` pixels per side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ConfigError(
            f"model.name: {name} needs images [channels, height, width] of at least "
            f"{least}x{least} pixels; a sample here has shape {list(shape)}; use mlp or auto"
        )
    return shape


def refuse_other_than_tokens(name: str, shape: Shape) -> None:
    """Refuse samples that are not sequences of tokens."""
    if len(shape) != 1:
        raise ConfigError(
            f"model.name: {name} needs sequences of tokens [length]; a sample here has shape "
            f"{list(shape)}; use auto"
        )


# ---- fully connected networks -------------------------------------------------------------------


def linear(shape: Shape, classes: int) -> nn.Module:
    """One linear layer: logistic or linear regression."""
    return chain(flat=nn.Flatten(), head=head(math.prod(shape), classes))


def mlp(shape: Shape, classes: int, *, hidden: tuple[Width, ...] = (64,)) -> nn.Module:
    """Fully connected layers with ReLU; P2's Office-Home network is hidden = [1000, 200].

    hidden: the width of each hidden layer; an empty list is one linear layer
    """
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return chain(body=nn.Sequential(*layers), head=head(widths[-1], classes))


# ---- networks for images ------------------------------------------------------------------------


def lenet5(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 as P4 uses it: 6@5x5 pad 2, pool, 16@5x5, pool, 120, 84; ReLU and max-pool.

    If an image is too small for the second, unpadded convolution (under 12 pixels per side), that
    convolution is padded too.
    """
    channels, height, width = image_shape("lenet5", shape, 4)
    pad = 0 if min(height, width) >= 12 else 2
    body = [*convolution(channels, 6, 5, 2), nn.MaxPool2d(2)]
    body += [*convolution(6, 16, 5, pad), nn.MaxPool2d(2)]
    return with_dense(body, shape, (120, 84), classes)


def fedavg_cnn(
    shape: Shape, classes: int, *, padding: Annotated[int, Interval(ge=0, le=16)] = 2
) -> nn.Module:
    """The FedAvg paper's CNN (P1, P5): 5x5x32, pool, 5x5x64, pool, dense 512, same padding.

    padding: pixels around a convolution's input; 2 keeps its size, 0 reduces each side by 4
    """
    return _two_convolutions("fedavg_cnn", shape, 512, classes, padding)


def leaf_cnn(shape: Shape, classes: int) -> nn.Module:
    """LEAF's FEMNIST CNN (P3): 5x5x32, pool, 5x5x64, pool, dense 2048, same padding."""
    return _two_convolutions("leaf_cnn", shape, 2048, classes, 2)


def p2_cnn(shape: Shape, classes: int) -> nn.Module:
    """P2's CIFAR-10 network: three 3x3x128 convolutions, each with ReLU and pool, then linear."""
    channels, *_ = image_shape("p2_cnn", shape, 8)
    body: list[nn.Module] = []
    for inputs in (channels, 128, 128):
        body += [*convolution(inputs, 128, 3, 1), nn.MaxPool2d(2)]
    return with_dense(body, shape, (), classes)


def resnet18(shape: Shape, classes: int, *, norm: Literal["group", "batch"] = "group") -> nn.Module:
    """ResNet-18 with the 3x3 stem for small images (P2 and P5 on CIFAR-100, P3 on CIFAR-10).

    It replaces the DLA of P4.

    norm: "group" (32 groups; at the stem two channels per group) or "batch"
    """
    channels, *_ = image_shape("resnet18", shape, 8)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    blocks: list[nn.Module] = []
    inputs = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(inputs, width, stride, norm), Residual(width, width, 1, norm)]
        inputs = width
    body = nn.Sequential(
        stem, norm_layer(norm, 64), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return chain(body=body, head=head(512, classes))


class Residual(nn.Module):
    """A residual block: two convolutions beside an identity, or a 1x1 if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(out + self.shortcut(x))


def _two_convolutions(name: str, shape: Shape, dense: int, classes: int, padding: int) -> nn.Module:
    channels, *_ = image_shape(name, shape, 4 if padding >= 2 else 16)
    body = [*convolution(channels, 32, 5, padding), nn.MaxPool2d(2)]
    body += [*convolution(32, 64, 5, padding), nn.MaxPool2d(2)]
    return with_dense(body, shape, (dense,), classes)


def norm_layer(kind: str, width: int) -> nn.Module:
    """Batch norm, or group norm with 32 groups."""
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(32, width)


# ---- LSTM networks for sequences of tokens; ``vmap`` cannot map them: they need engine ``loop`` --

Vocabulary = Annotated[int, Interval(ge=1, le=10_000_000)]


def char_lstm(shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None) -> nn.Module:
    """LEAF's Shakespeare network: embedding 8, two LSTM layers of 256; predicts the next symbol.

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("char_lstm", shape)
    return Recurrent(vocabulary or classes, classes, embedding=8, hidden=256)


def word_lstm(shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None) -> nn.Module:
    """P3's Reddit network: two LSTM layers of 200, embedding 200 tied to the output, dropout 0.2.

    Dropout is after the embedding and after each layer; train.dropout sets another rate.

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("word_lstm", shape)
    return Recurrent(vocabulary or classes, classes, embedding=200, hidden=200, dropout=0.2)


def next_token_lstm(
    shape: Shape, classes: int, *, vocabulary: Vocabulary | None = None
) -> nn.Module:
    """P3's Reddit network as P3 trains it: word_lstm with an output at every position.

    It needs data with a target at every position (data.targets = "every").

    vocabulary: the number of different tokens, at least what the data has; by default just that
    """
    refuse_other_than_tokens("next_token_lstm", shape)
    tokens = max(vocabulary or classes, classes)
    sizes = {"embedding": 200, "hidden": 200}
    return Recurrent(tokens, classes, **sizes, dropout=0.2, every_position=True)


class Recurrent(nn.Module):
    """Two LSTM layers over tokens; the state of the last, or every, position predicts a class."""

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        embedding: int,
        hidden: int,
        dropout: float = 0.0,
        every_position: bool = False,
    ) -> None:
        super().__init__()
        self.every_position = every_position
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.drop = nn.Dropout(dropout)
        layers = (nn.LSTM(width, hidden, batch_first=True) for width in (embedding, hidden))
        self.lstm = nn.ModuleList(layers)
        self.head = head(hidden, classes)
        if embedding == hidden and vocabulary == classes:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes for every sequence, or for every position of it."""
        states = self.drop(self.embedding(x))
        for layer in self.lstm:
            states = self.drop(layer(states)[0])
        scores: Tensor = self.head(states if self.every_position else states[:, -1])
        return scores


# ---- networks by name ---------------------------------------------------------------------------


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


_BUILDERS: tuple[Builder, ...] = (
    *(linear, mlp, lenet5, fedavg_cnn, leaf_cnn, p2_cnn, resnet18),
    *(char_lstm, word_lstm, next_token_lstm),
)
MODELS: dict[str, Builder] = {build.__name__: build for build in _BUILDERS}


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
    if build in MODELS.values():
        return lambda: build(**options)
    return lambda: with_scores(build(**options))


def given_name(model: Any) -> str:
    """The name of a module, function or class that a program passed, with a digest of its values.

    Runs in a folder are continued with the same values only.
    """
    if not isinstance(model, nn.Module):
        name = str(getattr(model, "__qualname__", ""))
        if not callable(model) or not name.rpartition(".")[2].isidentifier():
            raise ConfigError(
                f"model: found {model!r}; expected a name, a torch.nn.Module, or a named function "
                "or class that makes one"
            )
        return name.rpartition(".")[2]
    made = hashlib.sha256(repr(model).encode())
    for value in model.state_dict().values():
        made.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{type(model).__name__}_{made.hexdigest()[:8]}"


def with_scores(module: nn.Module) -> nn.Module:
    """A user's module, which returns the scores alone in place of an object, dict or tuple."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: found {module!r}; expected a torch.nn.Module")
    if scores not in module._forward_hooks.values():
        module.register_forward_hook(scores)
    return module


def scores(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """A hook: the scores of an output with ``logits``, else the first entry of a tuple."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    raise ConfigError(
        f"model.name: {type(module).__name__} returns a {type(output).__name__}; expected a "
        "tensor of scores, an object or a dict with 'logits', or a tuple that begins with them"
    )


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
    and ``classes`` are filled in from the data. From Python a function that returns a module may be
    given too, or a module, which is copied.
    """
    if name in MODELS:
        return MODELS[name]
    if name in code.objects:
        given = code.objects[name]
        return (lambda: copy.deepcopy(given)) if isinstance(given, nn.Module) else given
    if ":" not in name:
        known = did_you_mean(name, ["auto", *MODELS, "package.module:Class"])
        raise ConfigError(f"model.name: no model is called '{name}'; {known}")
    return imported(name, nn.Module, "model.name", code)
