"""A trained model that somebody took home: the files of an export, and predictions with them.

Nothing in the folder is trusted: links, files that are not as the manifest lists them, values of
another kind, numbers that are not finite and tensors that do not fit the network are refused. No
file is a pickle, and no code comes from the folder. New samples are read by the schema of the
training data: a category that it does not have is unknown, columns that it does not have are
ignored, and cells that cannot be read are refused.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from ..core.algorithm import Mixture, client_digest
from ..core.answers import Answers
from ..core.batches import EVALUATION_BLOCK
from ..core.flat import FlatModel, build
from ..core.imports import Code, Given
from ..core.metrics import BESIDE, METRICS, Floats
from ..data.arrays import Array
from ..data.data_schema import Schema
from ..data.sources.sheets import (
    NUMBER,
    TargetColumn,
    some,
)
from ..data.standard import Preprocessing
from ..engines.evaluation import outputs
from ..errors import ConfigError, CoterieError, StoreError
from ..networks import registry
from ..storage import files
from ..storage.files import MOST_BYTES, parsed
from ..views.clinical import Estimate, estimated_score
from ..views.clinical_page import score_text
from .calibration import HIGHEST, tempered
from .model_card import (
    CONFIG,
    FORMAT,
    MODEL,
    MOST_MODELS,
    NAMES,
    PREPROCESSING,
    WEIGHTS,
    ExportConfig,
    NetworkFacts,
    network_factory,
    shapes_of,
)
from .new_samples import Reading, Source, read_new

# ---- predictions ---------------------------------------------------------------------------------

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per sample, in the order of the samples."""

    target: TargetColumn
    values: Floats  # [n, classes] probabilities, or [n] in the unit of the target
    kept: dict[str, list[str]]  # columns that were copied from the table
    ignored: tuple[str, ...] = ()  # columns of the table that the model does not use
    truth: Array | None = None  # [n] what the target column says: classes (-1: none) or numbers
    metric: str = "accuracy"  # by which the model was judged

    @property
    def judged(self) -> Array:
        """Which rows have a known target ``[n]``."""
        if self.truth is None:
            return np.zeros(len(self), bool)
        return np.isfinite(self.truth) if self.values.ndim == 1 else self.truth >= 0

    @property
    def scores(self) -> dict[str, Estimate]:
        """Scores of the rows whose target the table says, with 95 % intervals; often none.

        Rows count as independent of one another.
        """
        if self.truth is None:
            return {}
        rows, binary = self.judged, self.values.shape[1:] == (2,)
        answers = Answers(self.values[rows], self.truth[rows], np.arange(rows.sum()))
        names = dict.fromkeys([self.metric, *(BESIDE if binary else ())])
        found = {name: estimated_score(name, answers) for name in names}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was ignored, and how good the answers are where the table says the target."""
        found = []
        if self.ignored:
            found.append(f"columns that the model does not use are ignored: {some(self.ignored)}")
        if self.truth is not None:
            scores = (
                f"{METRICS[name].title} {score_text(one, name)}"
                for name, one in self.scores.items()
            )
            told = ", ".join(scores) or "too few for scores"
            found.append(
                f"column '{self.target.name}' was not used to predict; on the {self.judged.sum()} "
                f"of {len(self)} rows where it is known (95 % intervals): {told}"
            )
        return tuple(found)

    @property
    def labels(self) -> list[str]:
        """The most likely class of each sample; empty where the probabilities are not finite.

        In a regression, the predicted value as text.
        """
        if self.values.ndim == 1:
            return [repr(value) for value in self.values.tolist()]
        known = np.isfinite(self.values).all(axis=1)
        best = np.where(known, self.values.argmax(axis=1), -1).tolist()
        return [self.target.classes[at] if at >= 0 else "" for at in best]

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns of :meth:`to_csv`."""
        name = f"predicted {self.target.name}".strip()
        classes = (f"probability of {c}" for c in self.target.classes)
        return (*self.kept, name, *classes)

    def to_csv(self) -> str:
        """All answers as CSV text: kept columns, the answer, a probability for each class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        kept = list(zip(*self.kept.values(), strict=True)) or [()] * len(self.values)
        probable = self.values.tolist() if self.values.ndim == 2 else [()] * len(self.values)
        for old, label, shares in zip(kept, self.labels, probable, strict=True):
            writer.writerow([*old, _cell(label), *map(repr, shares)])
        return text.getvalue()

    def write(self, path: str | Path) -> None:
        """Write the CSV text to a file."""
        files.write_text(Path(path), self.to_csv())

    def __len__(self) -> int:
        return len(self.values)


def _cell(label: str) -> str:
    """The name of a class; a quote is put before one that a spreadsheet reads as a formula."""
    is_formula = label.startswith(_FORMULA) and not re.match(NUMBER, label)
    return f"'{label}" if is_formula else label


@final
@dataclass(frozen=True, eq=False)
class ExportedModel:
    """A trained model with its preprocessing."""

    config: ExportConfig
    preprocessing: Preprocessing
    network: FlatModel
    predictor: Mixture

    def predict(
        self,
        source: Source,
        *,
        keep: Sequence[str] = (),
        codes: str | Path | None = None,
        strict: bool = False,
        delimiter: str | None = None,
        encoding: str = "utf-8",
    ) -> Predictions:
        """Predict new samples: a file, a table in memory, or an array; rows keep their order.

        Columns ``keep`` of a table are copied to the answers; others that the model does not use
        are ignored. A category that training did not know counts as unknown, after the file
        ``codes`` (columns ``column``, ``code``, ``means``) has replaced a site's own codes. With
        ``strict`` unknown categories and missing columns are refused.
        """
        schema = self.preprocessing.schema
        new = read_new(source, schema, Reading(keep, codes, strict, delimiter, encoding))
        values = self._outputs(self.inputs(new.x))
        if schema.regression:
            values = self.preprocessing.in_units(values)
        return Predictions(
            *(schema.target, values.double().numpy(), new.kept, new.ignored, new.truth),
            metric=self.config.model.metric,
        )

    def inputs(self, x: Tensor) -> Tensor:
        """The network's inputs for encoded samples."""
        return self.preprocessing.inputs(x, self.config.network.dtype)

    def program(self) -> torch.export.ExportedProgram:
        """The whole model from encoded samples to answers, as ``torch.export`` gives it."""
        from .program import program

        return program(self)

    def write_onnx(self, path: str | Path) -> Path:
        """Write the same as an ONNX file, and return its path."""
        from .program import write_onnx

        return write_onnx(self, path)

    def _outputs(self, x: Tensor) -> Tensor:
        regression = self.preprocessing.schema.regression
        with torch.no_grad():
            parts = (
                outputs(self.network, self.predictor, block, regression)
                for block in x.split(EVALUATION_BLOCK)
            )
            found = torch.cat(list(parts))
        return found if regression else tempered(found, self.config.temperature)

    def __repr__(self) -> str:
        told = self.config.model
        return f"<model of '{told.client}' by {told.method}, {self.config.network.name}>"


# ---- reading an export ---------------------------------------------------------------------------


def load_export(path: str | Path, *, code: Given = None) -> ExportedModel:
    """Read the folder that ``coterie export`` or ``coterie site export`` wrote.

    A network of one's own is imported only from the folders ``code``, or from installed packages if
    ``code`` is ``"installed"``: the folder may come from somebody else.
    """
    path = files.folder_of(path, "EXPORT")
    _check_files(path)
    try:
        return _loaded(path, Code.of(code, installed=False))
    except ConfigError:
        raise
    except CoterieError as error:
        raise StoreError(f"{path}: {error}") from error


def _loaded(path: Path, code: Code) -> ExportedModel:
    config = parsed(_text(path / CONFIG), ExportConfig, "config")
    preprocessing = Preprocessing.from_json(_text(path / PREPROCESSING))
    example = preprocessing.schema.example()
    said = config.network.shape, config.network.classes
    if said != (tuple(example.x.shape[1:]), example.classes):
        raise StoreError(f"{CONFIG} and {PREPROCESSING} are of different models; export it again")
    if not 0.5 / HIGHEST <= config.temperature <= 2 * HIGHEST:
        raise StoreError(f"{CONFIG}: found the temperature {config.temperature}; export it again")
    states, weights = _states(path / MODEL)
    networks = [_filled(config.network, preprocessing.schema, code, one) for one in states]
    model = FlatModel(networks[0])
    predictor = Mixture(weights, torch.stack([model.flatten(one) for one in networks]))
    finite = bool(predictor.models.isfinite().all() and weights.isfinite().all())
    if not finite or client_digest(predictor) != config.digest:
        raise StoreError(f"{MODEL} does not give the digest in {CONFIG}; export the model again")
    return ExportedModel(config, preprocessing, model, predictor)


def _check_files(path: Path) -> None:
    """Refuse links, missing and changed files, and files of a newer format."""
    if not (path / files.MANIFEST).is_file() or not (path / CONFIG).is_file():
        raise StoreError(
            f"{path}: holds no exported model; expected a folder that 'coterie export' wrote"
        )
    files.refuse_links(path, [*NAMES, files.MANIFEST], depth=0)
    wrong = files.faults(path, sorted({*NAMES, *(found.name for found in path.glob("*.onnx"))}))
    if wrong:
        raise StoreError(
            f"{path}: is not as it was written ({'; '.join(wrong)}); nothing was loaded; copy the "
            "folder again, or export the model again"
        )
    config = files.read_json(path / CONFIG)
    number = config.get("format") if isinstance(config, dict) else None
    if type(number) is not int or number > FORMAT:
        raise StoreError(
            f"{path / CONFIG}: has the format {number!r}; expected at most {FORMAT}; install a "
            "newer version of coterie to read it"
        )


def _text(path: Path) -> str:
    data = files.read_start(path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise StoreError(f"{path.name}: is larger than {MOST_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{path.name}: is no UTF-8 text ({error})") from error


def _states(path: Path) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The parameters of every model of the mixture, and the mixture's weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(files.read_start(path, None))  # a copy: the file may change later
    except SafetensorError as error:
        raise StoreError(f"{path.name}: cannot be read ({error}); expected safetensors") from error
    weights = tensors.pop(WEIGHTS, torch.zeros(0))
    if weights.dim() != 1 or not 0 < len(weights) <= MOST_MODELS:
        raise StoreError(
            f"{path.name}: found '{WEIGHTS}' of shape {list(weights.shape)}; expected one number "
            f"for each of at most {MOST_MODELS:,} models"
        )
    states: list[dict[str, Tensor]] = [{} for _ in weights]
    for name, value in tensors.items():
        number, _, parameter = name.partition("/")
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(states):
            raise StoreError(f"{path.name}: found '{name}' beside {len(states)} weights")
        states[int(number)][parameter] = value
    return states, weights


def _filled(
    facts: NetworkFacts, schema: Schema, code: Code, state: Mapping[str, Tensor]
) -> nn.Module:
    """A network with these parameters; refuses names, shapes and types that are not its own."""
    factory = network_factory(facts, schema, code)
    expected = _shapes(shapes_of(facts, factory).state_dict())
    if _shapes(state) != expected:
        odd = sorted({*state} ^ {*expected}) or ["its shapes are others"]
        raise StoreError(f"{MODEL}: does not fit the network '{facts.name}' ({odd[0][:60]})")
    for name, value in state.items():
        if value.is_floating_point() and value.dtype != facts.dtype:
            raise StoreError(f"{MODEL}: '{name[:60]}' is {value.dtype}; expected {facts.dtype}")
    network = build(factory, MODEL).to(facts.dtype)
    network.load_state_dict(dict(state))
    if facts.precision == "bf16":
        return registry.in_bfloat16(lambda: network, "cpu")()
    return network


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}
