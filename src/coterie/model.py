"""A model is a vector: an ``nn.Module`` as a function of one flat parameter vector."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import draws
from .errors import ConfigError, did_you_mean


class Slot(NamedTuple):
    """Where one parameter lives in the vector."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The position after its last entry."""
        return self.start + self.shape.numel()


class FlatModel:
    """``FlatModel(module)(w, x)`` computes the module's output with the parameters in ``w``.

    Only trainable parameters are in the vector, each once (tied weights share a slot), in the
    module's own order. Frozen parameters stay with the module.

    >>> model = FlatModel(nn.Linear(2, 1))
    >>> model.size
    3
    >>> model(torch.tensor([1.0, 2.0, 0.5]), torch.tensor([[10.0, 1.0]]))
    tensor([[12.5000]])
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slots: tuple[Slot, ...] = tuple(_slots(module))
        self.size = self.slots[-1].stop if self.slots else 0
        if not self.size:
            raise ConfigError(
                "the model has no trainable parameter; expected at least one with requires_grad"
            )

    def __call__(self, w: Tensor, x: Tensor) -> Tensor:
        """The module's output at parameters ``w``."""
        parameters = {s.name: w[s.start : s.stop].view(s.shape) for s in self.slots}
        output: Tensor = functional_call(self.module, parameters, (x,))
        return output

    def flatten(self, module: nn.Module) -> Tensor:
        """The vector of another instance of the same module, as a copy."""
        named = dict(module.named_parameters())
        return torch.cat([named[s.name].detach().reshape(-1) for s in self.slots])

    def positions(self, modules: Iterable[str]) -> Tensor:
        """The vector's positions that belong to the named submodules or parameters."""
        found = []
        for name in modules:
            mine = [s for s in self.slots if s.name == name or s.name.startswith(name + ".")]
            if not mine:
                known = list(dict.fromkeys(s.name.rpartition(".")[0] for s in self.slots))
                raise ConfigError(f"the model has no layer '{name}'; {did_you_mean(name, known)}")
            found += [torch.arange(s.start, s.stop) for s in mine]
        return torch.cat(found).unique() if found else torch.arange(0)

    def layers(self) -> list[str]:
        """The names of the modules that own parameters, from input to output."""
        return list(dict.fromkeys(s.name.rpartition(".")[0] for s in self.slots))


def _slots(module: nn.Module) -> Iterable[Slot]:
    start = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield Slot(name, start, parameter.shape)
            start += parameter.numel()


def build(factory: Callable[[], nn.Module], *words: int | str) -> nn.Module:
    """A module whose initialisation is derived from words; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws.derive(*words))
        return factory()
