"""A trained model that somebody took home: the files of an export, and predictions with them.

Nothing in the folder is trusted: links, files that are not as the manifest lists them, values of
another kind, numbers that are not finite and tensors that do not fit the network are refused. No
file is a pickle, and no code comes from the folder. New samples are checked as strictly: whatever
the schema of the training data does not describe is refused, with what was found, what was
expected and what to do.
"""

import csv
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from ..core.algorithm import Mixture, client_digest
from ..core.batches import EVALUATION_BLOCK
from ..core.flat import FlatModel, build
from ..core.imports import Code, Given
from ..core.metrics import Floats
from ..data.arrays import Array, samples
from ..data.data_schema import Schema
from ..data.sources.sheets import (
    NUMBER,
    SUFFIXES,
    InputColumn,
    Sheet,
    TargetColumn,
    categories,
    floats,
    read_rows,
    refuse_infinite,
    sheet_of,
)
from ..data.sources.tables import encode
from ..data.standard import Preprocessing
from ..engines.evaluation import outputs
from ..errors import ConfigError, CoterieError, CoterieWarning, DataError, StoreError
from ..networks import registry
from ..storage import files
from ..storage.archives import read_npz
from ..storage.files import MOST_BYTES, parsed
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

# ---- new samples, in their order -----------------------------------------------------------------

MOST_SHOWN = 8  # names that a message lists
KEEP_OR_DROP = "copy a column to the answers with --keep '{0}', or ignore it with --drop '{0}'"
Source = Any  # a path, an array or tensor, or whatever pyarrow makes a table of


class NewSamples(NamedTuple):
    """Encoded samples, and the columns of the source that are copied to the answers."""

    x: Tensor  # [n, ...]
    kept: dict[str, list[str]]


class Others(NamedTuple):
    """Columns of a new table that are no inputs."""

    keep: Sequence[str] = ()  # copied to the answers
    drop: Sequence[str] = ()  # ignored
    delimiter: str | None = None
    encoding: str = "utf-8"


def read_new(source: Source, schema: Schema, others: Others) -> NewSamples:
    """Samples of a file, of an array, or of a table in memory, in their order.

    A table is a CSV, TSV or parquet file, or anything that ``pyarrow.table`` takes, as a dict of
    columns. Other samples are an array, or an npz file with one (or one called ``x``).
    """
    if schema.kind == "table":
        return _read_table(source, schema, others)
    if others.keep or others.drop:
        raise DataError(f"--keep, --drop: this model takes {schema.kind}, which have no columns")
    if isinstance(source, str | Path):
        source = _array_of(Path(source), schema)
    array = source.numpy() if isinstance(source, Tensor) else np.asarray(source)
    return NewSamples(array_samples(array, schema), {})


def _read_table(source: Source, schema: Schema, others: Others) -> NewSamples:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix not in SUFFIXES or not path.is_file():
            raise DataError(
                f"{path}: is no file that can be read as a table; expected one of "
                f"{', '.join(SUFFIXES)} with the columns {_some([c.name for c in schema.columns])}"
            )
        table = read_rows(path, others.delimiter, others.encoding, min(2, len(schema.columns)))
    else:
        table, path = in_memory(source, schema), Path("table")
    check_names(path, table.column_names, schema, others, KEEP_OR_DROP)
    sheet = sheet_of(table, [column.name for column in schema.columns], path)
    for column in schema.columns:
        check_cells(sheet, column)
    x = encode(sheet, schema.columns)
    return NewSamples(x, {name: _as_text(table.column(name)) for name in others.keep})


def in_memory(source: Source, schema: Schema) -> pa.Table:
    """The table that ``pyarrow.table`` makes of the source."""
    try:
        return source if isinstance(source, pa.Table) else pa.table(source)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"found {type(source).__name__}, which is no table ({error}); expected columns by "
            f"name: {_some([column.name for column in schema.columns])}"
        ) from error


def check_names(path: Path, found: list[str], schema: Schema, others: Others, advice: str) -> None:
    """Refuse a table that lacks columns, or has columns that are not said to be kept or dropped.

    ``advice`` says what to do with a column ``{0}`` that the model does not know.
    """
    wanted = [column.name for column in schema.columns]
    for option, names in (("keep", others.keep), ("drop", others.drop)):
        for name in names:
            if name not in found:
                raise DataError(f"--{option}: {path} has no column '{name}'; it has {_some(found)}")
            if name in wanted and option == "drop":
                raise DataError(f"--drop: the model needs column '{name}'; leave it in")
    extra = [name for name in found if name not in (*wanted, *others.keep, *others.drop)]
    missing = [name for name in wanted if name not in found]
    if missing:
        also = f", and has others: {_some(extra)}" if extra else ""
        raise DataError(
            f"{path}: lacks {len(missing)} of the model's {len(wanted)} columns: {_some(missing)}"
            f"{also}; expected {_some(wanted)}; add or rename them (cells of numbers may be empty)"
        )
    if extra:
        target = schema.target.name
        told = f" ('{target}' is what the model predicts)" if target in extra else ""
        raise DataError(
            f"{path}: has columns that the model does not know: {_some(extra)}{told}; expected "
            f"{_some(wanted)}; {advice.format(extra[0])}"
        )


def check_cells(sheet: Sheet, column: InputColumn) -> None:
    """Refuse cells that the column's description does not allow; warn of new gaps."""
    if column.kind == "levels":
        _refuse_unknown(sheet, column)
        return
    cells = sheet.table.column(column.name)
    if pa.types.is_string(cells.type):
        looks = pc.fill_null(pc.match_substring_regex(cells, NUMBER), True).to_numpy()
        for row in np.flatnonzero(~looks):
            raise DataError(
                f"{sheet.where(int(row))}: found '{cells[int(row)].as_py()}' in column "
                f"'{column.name}'; expected a number, as in training; correct the cell or leave it "
                "empty"
            )
    refuse_infinite(sheet, column.name, floats(cells))
    if cells.null_count and not column.missing:
        warnings.warn(
            CoterieWarning(
                f"{sheet.files[0].name}: column '{column.name}' has {cells.null_count} empty cells "
                "and had none in training; they are filled with the mean of the training data"
            ),
            stacklevel=4,
        )


def _refuse_unknown(sheet: Sheet, column: InputColumn) -> None:
    cells = categories(sheet, column.name)
    known = pc.is_in(cells, value_set=pa.array(column.levels)).to_numpy()
    for row in np.flatnonzero(~known):
        raise DataError(
            f"{sheet.where(int(row))}: found '{cells[int(row)].as_py()}' in column "
            f"'{column.name}', as in {int((~known).sum())} of {len(known)} rows; expected one of "
            f"{_some(column.levels)}, the categories of the training data; spell it as there, or "
            "leave the row out: the model knows nothing of it"
        )


def _as_text(column: pa.ChunkedArray) -> list[str]:
    return ["" if cell is None else str(cell) for cell in column.to_pylist()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_SHOWN]) + more


def _array_of(path: Path, schema: Schema) -> Array:
    try:
        if path.suffix != ".npz":
            raise ValueError(f"its name ends in '{path.suffix}'")
        arrays = read_npz(path)
        if "x" not in arrays and len(arrays) != 1:
            raise ValueError(f"it holds {_some(sorted(arrays))}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as {schema.kind} ({error}); expected an npz file with one "
            f"array, or one called x, of samples of shape {list(schema.shape)}"
        ) from error
    return arrays["x"] if "x" in arrays else next(iter(arrays.values()))


def array_samples(array: Array, schema: Schema) -> Tensor:
    """The array as samples of the schema; grey images become RGB if the model's have colour."""
    kinds = {"images": "u", "tokens": "iu", "features": "fiub"}[schema.kind]
    if array.dtype.kind not in kinds or (schema.kind == "images" and array.dtype != np.uint8):
        raise DataError(f"found numbers of type {array.dtype} as {schema.kind}; {_wants(schema)}")
    x = samples(array, schema.kind == "tokens")
    if schema.kind == "images" and x.shape[1:2] == (1,) and x.ndim == 4:
        x = x.expand(len(x), schema.shape[0], *x.shape[2:])
    if tuple(x.shape[1:]) != schema.shape or not len(x):
        raise DataError(f"found an array of shape {list(array.shape)}; {_wants(schema)}")
    if schema.kind == "tokens" and not 0 <= int(x.min()) <= int(x.max()) < schema.tokens:
        raise DataError(f"found tokens from {x.min()} to {x.max()}; {_wants(schema)}")
    return x


def _wants(schema: Schema) -> str:
    kind = {"images": "uint8 pixels", "tokens": f"tokens below {schema.tokens}"}
    shape = ["samples", *schema.shape]
    return f"expected {kind.get(schema.kind, 'numbers')} of shape [{', '.join(map(str, shape))}]"


# ---- predictions ---------------------------------------------------------------------------------

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per sample, in the order of the samples."""

    target: TargetColumn
    values: Floats  # [n, classes] probabilities, or [n] in the unit of the target
    kept: dict[str, list[str]]  # columns that were copied from the table

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
        drop: Sequence[str] = (),
        delimiter: str | None = None,
        encoding: str = "utf-8",
    ) -> Predictions:
        """Predict new samples: a file, a table in memory, or an array; rows keep their order.

        Columns ``keep`` of a table are copied to the answers, columns ``drop`` are ignored; any
        other column that the model does not know is refused.
        """
        schema = self.preprocessing.schema
        new = read_new(source, schema, Others(keep, drop, delimiter, encoding))
        values = self._outputs(self.inputs(new.x))
        if schema.regression:
            values = self.preprocessing.in_units(values)
        return Predictions(schema.target, values.double().numpy(), new.kept)

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
            return torch.cat(list(parts))

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
    wrong = files.faults(path)
    listed = files.read_json(path / files.MANIFEST).get("files", {}) if not wrong else NAMES
    wrong += [f"{name} is not in {files.MANIFEST}" for name in NAMES if name not in listed]
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
