"""What a config changes in a network: its start, its frozen parameters, low-rank adapters.

``model.weights`` is a file of safetensors, ``train.freeze`` are patterns of parameters that are
not trained, and ``[model.lora]`` are adapters (Hu et al., LoRA, ICLR 2022): a chosen linear layer
computes ``W x + alpha / rank * B A x`` with a frozen ``W``. Methods see trainable parameters only,
so they train, mix, send and keep the adapters alone; the rest is part of the network.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.ranges import Count, Positive
from ..errors import ConfigError, did_you_mean

LORA_A, LORA_B = "lora_a", "lora_b"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters: the only trained parameters beside those that ``train`` names."""

    layers: tuple[str, ...] = ("*",)  # patterns of names of linear layers, as in "*.query"
    rank: Count = 4  # of the product of the two matrices of an adapter
    alpha: Positive = 8.0  # an adapter's output is multiplied by alpha / rank
    train: tuple[str, ...] = ()  # patterns of other parameters that are trained, as in "head.*"


@dataclasses.dataclass(frozen=True)
class Changes:
    """All changes of a network; by default none."""

    weights: str | None = None
    freeze: tuple[str, ...] = ()
    lora: Lora | None = None

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> "Changes":
        """The changes that the tables of a run's config ask for."""
        model, freeze = tables["model"], tables["train"].get("freeze", ())
        lora = model.get("lora")
        lists = {name: tuple(lora[name]) for name in ("layers", "train")} if lora else {}
        return cls(
            model.get("weights"), tuple(freeze), None if lora is None else Lora(**{**lora, **lists})
        )

    def made(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """A function that makes the changed networks."""
        if self == Changes():
            return make
        start = None if self.weights is None else _read(self.weights)

        def changed() -> nn.Module:
            module = make()
            if start is not None:
                _load(module, start, str(self.weights))
            if self.lora is not None:
                _adapt(module, self.lora)
            _freeze(module, self.freeze)
            return module

        return changed


# ---- a start from a file -------------------------------------------------------------------------


def _read(path: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"model.weights: found no file '{path}'") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.weights: '{path}' cannot be read ({error}); expected a file of safetensors"
        ) from error


def _load(module: nn.Module, start: Mapping[str, Tensor], path: str) -> None:
    """Load the tensors of a file; the network may have others, which start as they would."""
    own = module.state_dict()
    for name, value in start.items():
        if name not in own:
            raise ConfigError(
                f"model.weights: '{path}' has '{name}', which the network lacks; "
                f"{did_you_mean(name, own)}"
            )
        if own[name].shape != value.shape:
            raise ConfigError(
                f"model.weights: '{name}' has shape {list(value.shape)} in '{path}'; expected "
                f"{list(own[name].shape)}; leave a layer that shall start anew out of the file"
            )
    module.load_state_dict(dict(start), strict=False)


# ---- frozen parameters ---------------------------------------------------------------------------


def _freeze(module: nn.Module, patterns: Iterable[str]) -> None:
    named = dict(module.named_parameters())
    for name in _matching(patterns, named, "train.freeze", "parameters"):
        named[name].requires_grad_(False)


def _matching(
    patterns: Iterable[str], names: Iterable[str], field: str, what: str
) -> dict[str, None]:
    """The names that match any of the patterns; refuses a pattern that matches none."""
    known, found = list(names), dict[str, None]()
    for pattern in patterns:
        mine = fnmatch.filter(known, pattern)
        if not mine:
            raise ConfigError(
                f"{field}: '{pattern}' matches none of the network's {what}; "
                f"{did_you_mean(pattern, known)}"
            )
        found |= dict.fromkeys(mine)
    return found


# ---- low-rank adapters ---------------------------------------------------------------------------


class LowRank(nn.Linear):
    """A linear layer with an adapter; its own weight is frozen."""

    lora_a: nn.Parameter  # [rank, inputs]
    lora_b: nn.Parameter  # [outputs, rank], zero at the start: the adapter then changes nothing
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def _adapt(module: nn.Module, lora: Lora) -> None:
    """Give the chosen linear layers adapters, and freeze what is not to be trained."""
    named = dict(module.named_parameters())
    kept = _matching(lora.train, named, "model.lora.train", "parameters")
    linear = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    chosen = _matching(lora.layers, linear, "model.lora.layers", "linear layers")
    for name, parameter in named.items():
        parameter.requires_grad_(name in kept)
    for name in chosen:
        if not any(each.startswith(f"{name}.") for each in kept):
            _low_rank(linear[name], lora)


def _low_rank(layer: nn.Linear, lora: Lora) -> None:
    first = nn.Parameter(layer.weight.new_empty(lora.rank, layer.in_features))
    nn.init.kaiming_uniform_(first, a=math.sqrt(5))
    layer.__class__ = LowRank
    setattr(layer, LORA_A, first)
    setattr(layer, LORA_B, nn.Parameter(layer.weight.new_zeros(layer.out_features, lora.rank)))
    layer.scale = lora.alpha / lora.rank  # type: ignore[assignment]


def unused_adapter(module: nn.Module, sample: Tensor) -> str | None:
    """The name of a layer whose adapter does not change the outputs; None if all do.

    A module that reads the weight of a layer and never calls it passes its adapter by, as the fast
    path of ``nn.TransformerEncoderLayer`` does in evaluation.
    """
    with torch.no_grad():
        plain = module(sample)
        for name, layer in module.named_modules():
            if isinstance(layer, LowRank):
                layer.lora_b.fill_(1.0)
                same = torch.equal(module(sample), plain)
                layer.lora_b.zero_()
                if same:
                    return str(name)
    return None


def merged(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the network without adapters: each is added to its layer's weight."""
    found = dict(state)
    for name, layer in module.named_modules():
        if isinstance(layer, LowRank):
            a, b = found.pop(f"{name}.{LORA_A}"), found.pop(f"{name}.{LORA_B}")
            found[f"{name}.weight"] = found[f"{name}.weight"] + layer.scale * (b @ a)
    return found
