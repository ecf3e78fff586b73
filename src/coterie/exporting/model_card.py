"""What is known of an exported model, for programs (config.json) and for people (README.md)."""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..core.imports import INSTALLED_ONLY, Code
from ..core.metrics import LEAST_CHANCE, METRICS
from ..data.data_schema import Schema
from ..data.standard import Preprocessing
from ..networks import registry
from ..networks.registry import Recurrent, Residual, head, norm_layer
from ..storage import files
from ..storage.files import strict
from ..views import words
from ..views.clinical import SiteClinical
from ..views.reliance import Collaborator
from .clinical_card import markdown_table, plain

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


def _group_norm(norm: nn.GroupNorm) -> str:
    return f"nn.GroupNorm({norm.num_groups}, {norm.num_channels}, eps={norm.eps})"


_WRITERS: dict[type[nn.Module], _Writer] = {
    nn.GroupNorm: _Writer(_group_norm),  # its repr has an argument that older versions do not know
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

LOADING = """\
tensors, models = load_file("model.safetensors"), [network() for _ in range({count})]
for i, model in enumerate(models):
    state = {{k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{{i}}/")}}
    model.eval().load_state_dict(state, assign=True)
predict = lambda x: sum(w * m(x){last} for w, m in zip(tensors["weights"], models))
"""
CALIBRATED = """\
calibrated = lambda x: (predict(x).clamp(min={least}).log() / {temperature!r}).softmax(-1)
"""


def card(
    config: ExportConfig,
    preprocessing: Preprocessing,
    count: int,
    clinical: SiteClinical | None = None,
    told: str = "",
) -> str:
    """The text of ``README.md``; ``count`` is the number of models in the mixture.

    ``told`` is the :func:`clinical_section`.
    """
    facts = config.model
    trust = (
        "## How far to trust its probabilities" if clinical and clinical.outcome else "## Subgroups"
    )
    parts = (
        f"# Model of {plain(facts.client)}, trained by {plain(words.label(facts.method))}",
        _what(config, preprocessing, count),
        "## How good it is",
        _quality(config, clinical),
        *((trust, told) if told else ()),
        "## Intended use, and limits",
        _limits(config, preprocessing.schema),
        "## Use it with coterie",
        _with_coterie(preprocessing.schema),
        "## Load it with plain PyTorch",
        _plain_torch(config.network, preprocessing.schema, count, config.temperature),
        "## Inputs",
        _inputs(preprocessing),
        "## Where it comes from",
        _origin(config),
    )
    return "\n\n".join(parts) + "\n"


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(plain, names))


def _what(config: ExportConfig, preprocessing: Preprocessing, count: int) -> str:
    """What it predicts, and how the client got it: in the run, or by joining it later."""
    facts, target = config.model, preprocessing.schema.target
    asked = "a number in the unit of the training data"
    if target.classes:
        more = len(target.classes) - 20
        asked = f"a probability for each of the classes {_listed(target.classes[:20])}"
        asked += f" and {more} more" if more > 0 else ""
    way = f" in {facts.rounds} rounds of federated training"
    if facts.onboarded:
        way = (
            f", which was **not in the federation**: it was onboarded after {facts.rounds} rounds "
            f"of federated training, with {facts.train} labelled samples of its own, and no other "
            "client trained for it"
        )
    several = f" It is a mixture of {count} such networks." if count > 1 else ""
    return (
        f"It predicts {plain(target.name) or 'the target'}: {asked}. It is a network of the kind "
        f"`{config.network.name}`, made for the client {plain(facts.client)}{way}.{several}\n\n"
        f"{_partners(facts)}"
    )


def _partners(facts: ModelFacts) -> str:
    """Everybody whose model entered this one, with the weights that are known."""
    known = [one for one in facts.collaborators if one.entered is not None]
    others = [one for one in facts.collaborators if one.entered is None]
    if not facts.collaborators:
        return "No other client's model went into it."
    names = _listed(one.name for one in others)
    if not known:
        how = "made from the models of" if facts.onboarded else "trained together with"
        return f"It was {how} {names}: the parts of each are not recorded."
    rows = [
        (plain(one.name), *map(words.part, (one.average, one.last, one.entered))) for one in known
    ]
    head = "collaborator", "weight on average", "weight in the last round", "part of this model"
    when = "when it joined"
    if not facts.onboarded:
        when = f"over the rounds of this run (seed {facts.seed}) in which it took part"
    maybe = f"\n\nMay have entered it too, in a weighing that is not recorded: {names}."
    return (
        "The models of these clients entered it, directly or through others:\n\n"
        f"{markdown_table(head, rows)}\n\nWeights are parts of the client's weight on others, "
        f"{when}; a part of this model is what is left of another's after all rounds of mixing."
        f"{maybe if others else ''}"
    )


def _quality(config: ExportConfig, clinical: SiteClinical | None) -> str:
    facts = config.model
    metric, unit = METRICS[facts.metric], words.unit(facts.metric)
    if facts.score is None:
        positives = None if clinical is None else clinical.numbers.positives
        why = "the client had no test data"
        if facts.test:
            why = f"its model failed on the client's {facts.test} test samples"
        if facts.test and positives in (0, facts.test):
            lacks = "no positives" if positives == 0 else "nothing but positives"
            why = f"there are {lacks} among the client's {facts.test} test samples"
        score = f"It has no test score: {why}."
    else:
        number = words.number(facts.score, facts.metric)
        score = (
            f"On the client's own {facts.test} test samples, which were not used for training: "
            f"**{metric.title} {number}{unit}**" + (f" ({metric.unit})." if metric.unit else ".")
        )
    counts = f"The client trained on {facts.train} samples and validated on {facts.val}."
    return "\n\n".join([score, counts, *map(plain, facts.notes)])


def _limits(config: ExportConfig, schema: Schema) -> str:
    facts = config.model
    name = plain(facts.client)
    judged = f"It was judged on data of {name} alone."
    if facts.score is None:
        judged = "It was not judged: it has no test score."
    elif facts.test < 1000:
        judged += f" With {facts.test} test samples the score is itself uncertain."
    return (
        f"It is meant for new samples that come about as those of {name} did: the same columns, "
        "units and way of measuring, and the same kind of cases.\n\n"
        f"{judged} Elsewhere, "
        "or after a change of equipment, coding or patients, it may be wrong without any sign of "
        "it: judge it again on labelled samples first.\n\n"
        + (
            ("Its probabilities were not calibrated. " if config.temperature == 1.0 else "")
            if not schema.regression
            else "It gives no interval around a value. "
        )
        + "It is the result of an experiment, not an approved product: no decision about a person "
        "should rest on it alone."
    )


def _with_coterie(schema: Schema) -> str:
    new = "new.csv" if schema.kind == "table" else "new.npz"
    return f"```\ncoterie predict . {new} --out answers.csv\n```\n\n" + (
        "The file needs the columns below; their order does not matter. Other columns, such as an "
        "id, are ignored, or copied to the answers with `--keep`."
        if schema.kind == "table"
        else "The file holds one array of samples, as below."
    )


def _plain_torch(network: NetworkFacts, schema: Schema, count: int, temperature: float) -> str:
    last = ".softmax(-1)" if not schema.regression else ".squeeze(-1)"
    given = "probabilities of the classes" if not schema.regression else "values to scale back"
    half = network.precision == "bf16"
    lines = LOADING.format(count=count, last=last)
    if temperature != 1.0:
        lines += CALIBRATED.format(temperature=temperature, least=LEAST_CHANCE)
    return (
        "In this folder, with torch and safetensors alone:\n\n```python\n"
        f"{_network_code(network, schema)}\n\n\n{lines}```\n\n"
        f"`predict(x)` takes inputs of shape [n, {', '.join(map(str, network.shape))}], prepared "
        f"as below, and gives the {given}."
        + (" The run computed in bfloat16; these lines compute in float32." if half else "")
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


def _inputs(preprocessing: Preprocessing) -> str:
    schema, moments = preprocessing.schema, preprocessing.moments
    shape = f"[{', '.join(map(str, schema.shape))}]"
    text = {
        "table": "One row of the table becomes the features below, in this order.",
        "images": f"An image is an array of uint8 pixels of shape {shape}.",
        "tokens": f"A sample is a row of {shape} whole numbers below {schema.tokens}.",
        "features": f"A sample is an array of numbers of shape {shape}.",
    }[schema.kind]
    if preprocessing.pixels is not None:
        scale, shift = preprocessing.pixels.scale, preprocessing.pixels.shift
        text += f" The input is pixel * {list(scale)} + {list(shift)}, by channel."
    if moments is not None:
        text += (
            " Numbers become (number - mean) / deviation; a missing number is replaced by the mean."
            " `preprocessing.json` has a mean and a deviation for each feature, in this order,"
            " under `moments`; those of features that are 0 or 1 are not used."
        )
    if schema.regression and moments is not None:
        text += f" A value is the output * {moments.target_std!r} + {moments.target_mean!r}."
    return text + _column_table(schema)


def _column_table(schema: Schema) -> str:
    if schema.kind != "table":
        return ""
    rows = []
    for column in schema.columns[:MOST_ROWS]:
        if column.kind == "levels":
            what = "category", f"1 for its own category, else 0: {_listed(column.levels)}"
        else:
            extra = ", and 1 if it is missing, else 0" if column.missing else ""
            what = "number", f"the standardised number{extra}"
        rows.append((plain(column.name), *what))
    more = len(schema.columns) - MOST_ROWS
    rest = f"\n\n{more} more columns are in `preprocessing.json`." if more > 0 else ""
    return f"\n\n{markdown_table(('column', 'kind', 'becomes'), rows)}{rest}"


def _origin(config: ExportConfig) -> str:
    facts = config.model
    rows = {
        "method": facts.method,
        "rounds": facts.rounds,
        "seed": facts.seed,
        "run": facts.run,
        "data": facts.data or "known at the coordinator only",
        "model": config.digest,
        "network": f"{config.network.name} {json.dumps(config.network.options)}",
        "coterie": config.coterie,
    }
    told = markdown_table(("", ""), [(name, plain(value)) for name, value in rows.items()])
    return (
        f"{told}\n\n`config.json` has the same for programs; "
        "`MANIFEST.json` has the size and the sha256 of every file."
    )
