"""An ``nn.Module`` as a function of one flat parameter vector."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, did_you_mean
from . import random

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm, nn.LayerNorm)


# The inputs of layers that :meth:`FlatModel.entering` asks for, during its pass, and what
# :meth:`FlatModel.tapped` adds to outputs.
_INPUTS: ContextVar[dict[nn.Module, Tensor] | None] = ContextVar("inputs", default=None)
_ADDED: ContextVar[dict[nn.Module, Tensor] | None] = ContextVar("added", default=None)


class Slot(NamedTuple):
    """The position of one parameter or buffer in the vector."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatModel:
    """``FlatModel(module)(w, x)`` computes the module's output with the parameters in ``w``.

    The vector holds the trainable parameters, each once (tied weights share a slot), in the
    module's own order, followed by the floating-point buffers (batch-norm statistics): mixing
    models then mixes their buffers with the same weights. ``parameters`` is the number of
    parameter entries; distances, gradients and optimisers use only those. Frozen parameters stay
    in the module. A tied weight belongs to the last module that uses it: an output layer that
    shares the weight of an embedding owns it.

    With ``apart`` the vector that methods see (of ``size`` entries) excludes the buffers, with
    ``norms`` also the parameters of normalisation layers, ``scales`` in number. Calls and
    :meth:`refreshed` always take a vector with all of them (of ``whole`` entries): :meth:`joined`
    makes it of the two vectors, and :meth:`split` takes the second out of it. ``coupled`` says
    that in training the outputs of a batch's samples depend on each other. ``nn.Dropout`` draws its
    masks from the ``stream`` of a call.

    >>> model = FlatModel(nn.Linear(2, 1))
    >>> model.size
    3
    >>> model(torch.tensor([1.0, 2.0, 0.5]), torch.tensor([[10.0, 1.0]])).item()
    12.5
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        apart: bool = False,
        norms: bool = False,
        dropout: float | None = None,
    ) -> None:
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise ConfigError(
                "the model has no trainable parameter; expected at least one with requires_grad"
            )
        buffers = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        slots = _slots([*trainable, *buffers])
        self._slots, self._buffers = slots, {name for name, _ in buffers}
        self._names = _all_names(module)
        kept = _parameters_of_norms(module) if norms else set()
        shared = [(name, value) for name, value in trainable if name not in kept]
        if not shared:
            raise ConfigError(
                "train.buffers: 'fedbn' keeps all of the network's parameters at the clients, as "
                "it has normalisation layers only; use 'average'"
            )
        self.whole, self.parameters = slots[-1].stop, sum(p.numel() for _, p in shared)
        self.scales = sum(p.numel() for _, p in trainable) - self.parameters
        self.apart = (apart or norms) and bool(buffers or self.scales)
        self.slots = _slots(shared) if apart or norms else slots
        self.size = self.slots[-1].stop
        own = [slot for slot in slots if slot.name in kept or slot.name in self._buffers]
        others = [slot for slot in slots if slot not in own]
        places = [torch.arange(slot.start, slot.stop) for slot in [*others, *own]]
        # Where each entry of the whole vector is in (what methods see, what is kept apart).
        self._order = torch.cat(places).argsort() if self.scales else None
        self.coupled = _couples(module)
        self.module = module.eval()
        self._training = copy.deepcopy(module).train()
        self._masks = _masked(self._training, dropout)
        self.random = any(mask.rate > 0 for mask in self._masks)
        self.recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        self.tied = any(len(self._names[name]) > 1 for name, _ in trainable)
        self.taps: dict[str, torch.Size] | None = None  # per_sample.find_taps, with privacy

    def __call__(
        self, w: Tensor, x: Tensor, *, training: bool = False, stream: Tensor | None = None
    ) -> Tensor:
        """The module's output with the parameters ``w``, in evaluation mode unless ``training``."""
        named = self._named(w)
        for name in self._buffers:  # buffers need no gradient, and batch norm writes into them
            named[name] = named[name].detach().clone() if training else named[name].detach()
        return self._call(named, x, training, stream)

    def entering(
        self,
        layer: str,
        w: Tensor,
        x: Tensor,
        *,
        training: bool = False,
        stream: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As a call, and the input of one layer in the same pass: the features of a head."""
        within = (self._training if training else self.module).get_submodule(layer)
        if _note not in within._forward_pre_hooks.values():
            within.register_forward_pre_hook(_note)
        before = _INPUTS.set({})
        try:
            output = self(w, x, training=training, stream=stream)
            return output, (_INPUTS.get() or {})[within]
        finally:
            _INPUTS.reset(before)

    def tapped(
        self, w: Tensor, x: Tensor, added: dict[str, Tensor], stream: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A training pass in which ``added`` is added to outputs of layers; also their inputs."""
        parts = {name: self._training.get_submodule(name) for name in added}
        for part in parts.values():
            if _add not in part._forward_hooks.values():
                part.register_forward_pre_hook(_note)
                part.register_forward_hook(_add)
        before = _INPUTS.set({}), _ADDED.set({parts[name]: added[name] for name in added})
        try:
            output = self(w, x, training=True, stream=stream)
            seen = _INPUTS.get() or {}
            return output, {name: seen[part] for name, part in parts.items()}
        finally:
            _INPUTS.reset(before[0])
            _ADDED.reset(before[1])

    def layer(self, name: str) -> nn.Module:
        return self.module.get_submodule(name)

    def owners(self) -> list[str]:
        """The names of the layers that own the trainable parameters."""
        return list(dict.fromkeys(s.name.rpartition(".")[0] for s in self._trained))

    @property
    def _trained(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.name not in self._buffers]

    def own(self, w: Tensor) -> dict[str, dict[str, Tensor]]:
        """Every layer's own parameters in a vector, by the layer's name and theirs."""
        named, found = self._named(w), dict[str, dict[str, Tensor]]()
        for slot in self._trained:
            layer, _, parameter = slot.name.rpartition(".")
            found.setdefault(layer, {})[parameter] = named[slot.name]
        return found

    def gathered(self, own: dict[str, dict[str, Tensor]]) -> Tensor:
        """The vector of what :meth:`own` gives."""
        names = (slot.name.rpartition(".") for slot in self._trained)
        return torch.cat([own[layer][parameter].reshape(-1) for layer, _, parameter in names])

    def refreshed(self, w: Tensor, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """``w`` with its buffers as updated by a training pass over ``x``."""
        if self.whole == self.parameters:
            return w
        named = {name: value.detach().clone() for name, value in self._named(w).items()}
        with torch.no_grad():
            self._call(named, x, True, stream)
        return torch.cat([named[s.name].reshape(-1) for s in self._slots])

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        # One split, not one slice per slot: its gradient is one concatenation instead of a sum of
        # vectors that are zero except in one slot. A tracer may hold the parts of this split apart
        # (compiled.trace.rewrite); with slices it would keep vectors whole, which is slower.
        stop = self._slots[-1].stop
        parts = (w if len(w) == stop else w[:stop]).split([s.shape.numel() for s in self._slots])
        return {s.name: part.view(s.shape) for s, part in zip(self._slots, parts, strict=True)}

    def _call(
        self, named: dict[str, Tensor], x: Tensor, training: bool, stream: Tensor | None
    ) -> Tensor:
        module = self._training if training else self.module
        if training and self._buffers:  # batch norm increments its integer buffers in place
            counters = (item for item in module.named_buffers() if not item[1].is_floating_point())
            named = {**named, **{name: value.clone() for name, value in counters}}
        for mask in self._masks:
            mask.begin(stream)
        output: Tensor = functional_call(module, named, (x,))
        return output

    def statistics(self, module: nn.Module) -> Tensor:
        """What another instance of the same module has of what is kept apart, as a copy."""
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shared = {slot.name for slot in self.slots} - self._buffers
        own = [slot for slot in self._slots if slot.name not in shared]
        found = [named[slot.name].detach().reshape(-1) for slot in own]
        return torch.cat(found) if found else torch.zeros(0)

    def joined(self, w: Tensor, own: Tensor) -> Tensor:
        """Whole vectors of what methods see and of what is kept apart from it."""
        found = torch.cat([w, own], -1)
        return found if self._order is None else found[..., self._order.to(found.device)]

    def split(self, whole: Tensor) -> Tensor:
        """What is kept apart, of a whole vector: the norms' parameters, then the buffers."""
        if self._order is None:
            return whole[self.parameters :]
        return whole[self._order.argsort()[self.size :].to(whole.device)]

    def flatten(self, module: nn.Module) -> Tensor:
        """The vector of another instance of the same module, as a copy."""
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return torch.cat([named[s.name].detach().reshape(-1) for s in self.slots])

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """What ``module.load_state_dict`` takes, with the values of ``w``, as copies."""
        found = dict(self.module.state_dict())
        for first, part in self._named(w).items():
            found |= {name: part for name in self._names[first] if name in found}
        return {name: value.detach().clone() for name, value in found.items()}

    def positions(self, modules: Iterable[str]) -> Tensor:
        """The vector's positions that belong to the named submodules or parameters."""
        found = []
        for name in modules:
            mine = [s for s in self.slots if self._inside(s, name)]
            if not mine:
                raise ConfigError(
                    f"the model has no layer '{name}'; {did_you_mean(name, self.layers())}"
                )
            found += [torch.arange(s.start, s.stop) for s in mine]
        return torch.cat(found).unique() if found else torch.arange(0)

    def _inside(self, slot: Slot, name: str) -> bool:
        """Whether the slot belongs to the module or parameter ``name``, by any of its names."""
        return any(f"{known}.".startswith(f"{name}.") for known in self._names[slot.name])

    def owner(self, slot: Slot) -> str:
        """The module that a slot belongs to; for a tied weight, the last one that uses it."""
        return self._names[slot.name][-1].rpartition(".")[0]

    def ordered(self) -> list[Slot]:
        """The slots in the order of the modules they belong to, from input to output."""
        order = {name: place for place, name in enumerate(n for n, _ in _tensors(self.module))}
        return sorted(self.slots, key=lambda slot: order[self._names[slot.name][-1]])

    def layers(self) -> list[str]:
        """The names of the modules that own parameters or buffers, from input to output."""
        return list(dict.fromkeys(self.owner(slot) for slot in self.ordered()))


def _note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook that keeps a layer's input while :meth:`FlatModel.entering` asks for inputs."""
    seen = _INPUTS.get()
    if seen is not None:
        seen[module] = inputs[0]


def _add(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A hook that adds to a layer's output what :meth:`FlatModel.tapped` asks for."""
    added = (_ADDED.get() or {}).get(module)
    return output if added is None else output + added


def _parameters_of_norms(module: nn.Module) -> set[str]:
    """The names of the parameters of normalisation layers."""
    norms = {f"{name}." if name else "": m for name, m in module.named_modules()}
    return {
        f"{prefix}{name}"
        for prefix, part in norms.items()
        if isinstance(part, NORMS)
        for name, _ in part.named_parameters(recurse=False)
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under each of its names, module by module."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        yield from part.named_parameters(prefix, recurse=False)
        yield from part.named_buffers(prefix, recurse=False)


def _all_names(module: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter and buffer, by its first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in _tensors(module):
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def _slots(named: Iterable[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, value in named:
        slots.append(Slot(name, start, value.shape))
        start += value.numel()
    return tuple(slots)


class _Mask(nn.Module):
    """``nn.Dropout`` in training, with masks derived from a stream and not torch's generator."""

    def __init__(self, rate: float, number: int) -> None:
        super().__init__()
        self.rate, self.number = rate, number
        self.begin(None)

    def begin(self, stream: Tensor | None) -> None:
        """Set the stream of the next pass; a layer that a pass uses twice draws two masks."""
        self.stream, self.uses = stream, 0

    def forward(self, x: Tensor) -> Tensor:
        """Zero entries with probability ``rate`` and scale the others to keep the mean."""
        if not self.rate:
            return x
        if self.stream is None:
            raise ValueError("a training pass through dropout needs a stream to draw from")
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        luck = random.uniform(self.stream, self.number, self.uses, places)
        self.uses += 1
        return x * (luck >= self.rate).to(x.dtype) / (1 - self.rate)


def _masked(module: nn.Module, rate: float | None) -> list[_Mask]:
    """Replace every ``nn.Dropout`` by a mask layer, at its own rate or at ``rate`` for all."""
    found: list[_Mask] = []
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                found.append(_Mask(child.p if rate is None else rate, len(found)))
                setattr(parent, name, found[-1])
    if rate and not found:
        raise ConfigError(
            f"train.dropout: found {rate:g}, but the model has no nn.Dropout layer; leave it out, "
            "or name a model that has one (char_lstm, word_lstm, or your own)"
        )
    return found


def _couples(module: nn.Module) -> bool:
    """Whether the module has batch norm; batch norm without running statistics is refused."""
    norms = [m for m in module.modules() if isinstance(m, BATCH_NORMS)]
    for norm in norms:
        if not norm.track_running_stats or norm.momentum is None:
            raise ConfigError(
                f"the model has {norm}; expected running statistics with a momentum: without them "
                "a prediction depends on the samples beside it or on a count of batches"
            )
    return bool(norms)


def build(factory: Callable[[], nn.Module], *words: int | str) -> nn.Module:
    """Build a module with a seed derived from ``words``; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.derive(*words))
        return factory()
