"""A model is a vector: an ``nn.Module`` as a function of one flat parameter vector."""

import copy
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

    The vector holds the trainable parameters, each once (tied weights share a slot), in the
    module's own order, and behind them the floating-point buffers (batch-norm statistics): mixing
    models then mixes their buffers with the same weights. ``parameters`` counts the first part;
    distances, gradients and optimisers see nothing else. Frozen parameters stay with the module.

    >>> model = FlatModel(nn.Linear(2, 1))
    >>> model.size
    3
    >>> model(torch.tensor([1.0, 2.0, 0.5]), torch.tensor([[10.0, 1.0]])).item()
    12.5
    """

    def __init__(self, module: nn.Module) -> None:
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise ConfigError(
                "the model has no trainable parameter; expected at least one with requires_grad"
            )
        buffers = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        self.slots = _slots([*trainable, *buffers])
        self._buffers = {name for name, _ in buffers}
        self.parameters = sum(p.numel() for _, p in trainable)
        self.size = self.slots[-1].stop
        self.module = module.eval()
        self._training = copy.deepcopy(module).train()

    def __call__(self, w: Tensor, x: Tensor, *, training: bool = False) -> Tensor:
        """The module's output at ``w``, in evaluation mode unless it is trained."""
        named = self._named(w)
        for name in self._buffers:  # batch norm has no gradient in them, and writes into them
            named[name] = named[name].detach().clone() if training else named[name].detach()
        return self._call(named, x, training)

    def refreshed(self, w: Tensor, x: Tensor) -> Tensor:
        """``w`` with the buffers that a training pass over ``x`` leaves behind."""
        if self.size == self.parameters:
            return w
        named = {name: value.detach().clone() for name, value in self._named(w).items()}
        with torch.no_grad():
            self._call(named, x, training=True)
        return torch.cat([named[s.name].reshape(-1) for s in self.slots])

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        return {s.name: w[s.start : s.stop].view(s.shape) for s in self.slots}

    def _call(self, named: dict[str, Tensor], x: Tensor, training: bool) -> Tensor:
        module = self._training if training else self.module
        if training and self.size > self.parameters:  # batch norm writes into its buffers
            named = {**named, **_counters(module)}
        output: Tensor = functional_call(module, named, (x,))
        return output

    def flatten(self, module: nn.Module) -> Tensor:
        """The vector of another instance of the same module, as a copy."""
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return torch.cat([named[s.name].detach().reshape(-1) for s in self.slots])

    def positions(self, modules: Iterable[str]) -> Tensor:
        """The vector's positions that belong to the named submodules or parameters."""
        found = []
        for name in modules:
            mine = [s for s in self.slots if f"{s.name}.".startswith(f"{name}.")]
            if not mine:
                raise ConfigError(
                    f"the model has no layer '{name}'; {did_you_mean(name, self.layers())}"
                )
            found += [torch.arange(s.start, s.stop) for s in mine]
        return torch.cat(found).unique() if found else torch.arange(0)

    def layers(self) -> list[str]:
        """The names of the modules that own parameters, from input to output."""
        return list(dict.fromkeys(s.name.rpartition(".")[0] for s in self.slots))


def _slots(named: Iterable[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, value in named:
        slots.append(Slot(name, start, value.shape))
        start += value.numel()
    return tuple(slots)


def _counters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the integer buffers, which a training pass would count up in place."""
    return {n: b.clone() for n, b in module.named_buffers() if not b.is_floating_point()}


def build(factory: Callable[[], nn.Module], *words: int | str) -> nn.Module:
    """A module whose initialisation is derived from words; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws.derive(*words))
        return factory()
