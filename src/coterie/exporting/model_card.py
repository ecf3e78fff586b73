"""What is known of an exported model, for programs (config.json) and for people (README.md)."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import asdict, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..core.imports import INSTALLED_ONLY, Code
from ..core.metrics import LEAST_CHANCE, METRICS
from ..data.data_schema import Schema
from ..data.standard import Preprocessing
from ..errors import printable
from ..networks import registry
from ..networks.registry import Recurrent, Residual, head, norm_layer
from ..storage import files
from ..storage.files import strict
from ..views import words
from ..views.clinical import FEWEST, SiteClinical
from ..views.clinical_page import TOO_FEW, rows_text, share_text, subgroup_text
from ..views.reliance import Collaborator
from .calibration import Recalibration

# ---- the files of an export ----------------------------------------------------------------------

FORMAT = 1
MODEL, CONFIG, PREPROCESSING = "model.safetensors", "config.json", "preprocessing.json"
CARD = "README.md"
NAMES = (MODEL, CONFIG, PREPROCESSING, CARD)
MOST_MODELS = 10_000  # of one mixture
WEIGHTS = "weights"  # of the mixture, in the file of the model


@strict
class ModelFacts:
    """What is known of a model: where it comes from, on which data, and how good it is."""

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
    collaborators: tuple[Collaborator, ...]  # whose models entered it
    notes: tuple[str, ...] = ()
    onboarded: bool = False  # the client was not in the run: it joined the finished one


@strict
class NetworkFacts:
    """The network of a model."""

    name: str
    options: dict[str, Any]
    shape: tuple[int, ...]  # of one input
    classes: int  # 0 for a regression
    precision: Literal["float32", "float64", "tf32", "bf16"]

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32


@strict
class ExportConfig:
    """The file ``config.json`` of an export."""

    network: NetworkFacts
    model: ModelFacts
    digest: str  # of the weights and parameters
    coterie: str  # the version that wrote it
    temperature: float = 1.0  # by which the logarithms of probabilities are divided
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


# ---- a network as plain PyTorch code, which needs no coterie and loads no foreign code -----------

# A network of ordinary layers is one expression. The residual block and the recurrent network are
# classes; their own source text stands before the expression.

# Layers whose ``repr`` is the call that makes them.
PLAIN: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.ReLU, nn.Flatten),
    *(nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d),
)
WIDTH = 88  # characters of a line


class WrittenNetwork(NamedTuple):
    """The code of a network."""

    definitions: str  # of classes and functions that the expression needs; may be empty
    expression: str  # makes the network


class _Writer(NamedTuple):
    """How a layer is written whose ``repr`` is not the call that makes it."""

    call: Callable[[Any], str]
    source: tuple[Callable[..., Any], ...] = ()  # what to define


def _residual(block: Residual) -> str:
    first = block.first
    norm = "batch" if isinstance(block.norm1, nn.BatchNorm2d) else "group"
    return f"Residual({first.in_channels}, {first.out_channels}, {first.stride[0]}, {norm!r})"


def _recurrent(network: Recurrent) -> str:
    table, layer = network.embedding, network.lstm[0]
    sizes = f"embedding={table.embedding_dim}, hidden={layer.hidden_size}"
    sizes += ", every_position=True" if network.every_position else ""
    return f"Recurrent({table.num_embeddings}, {network.head.out_features}, {sizes})"


_WRITERS: dict[type[nn.Module], _Writer] = {
    nn.GroupNorm: _Writer(  # its repr has an argument that older versions do not know
        lambda norm: f"nn.GroupNorm({norm.num_groups}, {norm.num_channels}, eps={norm.eps})"
    ),
    Residual: _Writer(_residual, (norm_layer, Residual)),
    Recurrent: _Writer(_recurrent, (head, Recurrent)),
}


def written_network(module: nn.Module) -> WrittenNetwork | None:
    """The code that makes such a network, in evaluation mode; None if it has foreign classes."""
    expression = _expression(module, 0)
    if expression is None:
        return None
    kinds = [type(part) for part in module.modules()]
    needed = [part for kind in kinds if kind in _WRITERS for part in _WRITERS[kind].source]
    definitions = "\n\n".join(inspect.getsource(part) for part in dict.fromkeys(needed))
    return WrittenNetwork(definitions, expression)


def _expression(module: nn.Module, depth: int) -> str | None:
    """The call that makes a module; None if a class is not known."""
    if type(module) in _WRITERS:
        return _WRITERS[type(module)].call(module)
    if type(module) in PLAIN:
        return f"nn.{module!r}"
    if type(module) is not nn.Sequential:
        return None
    inside = [(name, _expression(part, depth + 1)) for name, part in module.named_children()]
    if any(part is None for _, part in inside):
        return None
    named = any(not name.isdigit() for name, _ in inside)
    parts = [f"{name}={part}" if named else f"{part}" for name, part in inside]
    pad, line = "    " * (depth + 2), ", ".join(parts)
    if len(pad) + len(line) > WIDTH or "\n" in line:
        line = "\n" + "".join(f"{pad}{part},\n" for part in parts) + pad[4:]
    return f"nn.Sequential(OrderedDict({line}))" if named else f"nn.Sequential({line})"


# ---- the model card of an export: what the model is, for what it may be used, and how to load it

MOST_ROWS = 100  # columns of a table that the card lists
MOST_CLASSES = 20  # that it names
FEW = 1000  # test samples, below which a score is said to be uncertain
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|&~])")


def plain(text: object) -> str:
    """A text from data or a config, as plain text in Markdown."""
    return _MARKS.sub(r"\\\1", printable(text))


class JudgedClient(NamedTuple):
    """The numbers of a client's answers, where the outcome is a class."""

    clinical: SiteClinical | None = None
    recalibration: Recalibration | None = None
    before: SiteClinical | None = None  # the numbers without the recalibration


def card(
    config: ExportConfig, preprocessing: Preprocessing, count: int, judged: JudgedClient
) -> str:
    """The text of ``README.md``; ``count`` is the number of models in the mixture.

    Bins and subgroups with few rows are given without numbers: a card may be passed on.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import

    made = Environment(
        loader=PackageLoader(__package__, "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["plain"] = plain
    clinical, again, before = judged
    numbers = None if clinical is None else clinical.numbers
    old, new = (one and one.numbers.calibration for one in (before, clinical))
    return made.get_template("card.md").render(
        config=config,
        facts=config.model,
        network=config.network,
        temperature=config.temperature,
        preprocessing=preprocessing,
        schema=preprocessing.schema,
        count=count,
        metric=METRICS[config.model.metric],
        code=_network_code(config.network, preprocessing.schema),
        **{"clinical": clinical, "numbers": numbers, "old": old, "new": new, "again": again},
        **{"rows_text": rows_text, "subgroup_text": subgroup_text, "share_text": share_text},
        **{"words": words, "dumps": json.dumps, "least_chance": LEAST_CHANCE},
        **{"most": MOST_ROWS, "most_classes": MOST_CLASSES, "few": FEW},
        **{"fewest": FEWEST, "too_few": TOO_FEW},
    )


def _network_code(network: NetworkFacts, schema: Schema) -> str:
    """The imports, and the definition of ``network()``."""
    imports = ["from safetensors.torch import load_file"]
    if network.name not in registry.MODELS:
        module, _, name = network.name.partition(":")
        made = f"{name}(**{network.options!r})  # shape {network.shape}, classes {network.classes}"
        imports.append(f"from {module} import {name}  # your own network")
        return "\n".join(imports) + f"\n\n\ndef network():\n    return {made}"
    factory = network_factory(network, schema, INSTALLED_ONLY)
    code = written_network(shapes_of(network, factory))
    if code is None:
        raise AssertionError(f"the network {network.name} cannot be written out")
    imports = ["from collections import OrderedDict", "", "import torch", *imports]
    head = "\n".join([*imports, "from torch import Tensor, nn"])
    defined = f"\n\n\n{code.definitions.strip()}" if code.definitions else ""
    return f"{head}{defined}\n\n\ndef network():\n    return {code.expression}"
