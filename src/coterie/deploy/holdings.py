"""A site's own data: read once, as its owner lets it be told, divided by the site itself."""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import torch
from torch import Tensor

from ..core.metrics import METRICS
from ..core.shards import SPLITS, Shards
from ..data.arrays import TEST, TRAIN, VALIDATION, Scale
from ..data.data_schema import Schema
from ..data.federation import Dataset, Federation, Seal
from ..data.partition import Fold
from ..data.simulation import simulate
from ..data.site_data import SiteSource, read_with, site_federation, site_source
from ..data.sources.sheets import Sheet, numbers
from ..data.sources.tables import encode_table
from ..data.standard import Moments
from ..errors import ConfigError, DataError
from ..runs.run import JudgedRows, lack
from ..storage import files
from . import keys
from .approval import Approval, ForbiddenError
from .division import CLASSES, Columns, SiteDivision, row_keys
from .site_folder import SiteFolder
from .sums import masked, noisy, numeric_rows, sums_of, to_hex
from .terms import Experiment, SiteCounts

OTHER = "other"  # what a text becomes that is not on the agreed list
ROWS_PER_LEVEL = 5  # fewer, and a column of texts may name patients
PART = "part"  # the column of an exported division
ROLES = ("client", "target", "split", "unit", "time", "subgroup")


class SiteFacts(NamedTuple):
    """What a site tells of its data before an experiment."""

    counts: SiteCounts
    seal: Seal
    weak: str | None  # what the site lacks to be judged


class SentSums(NamedTuple):
    """The sums of a site as they leave."""

    numbers: tuple[str, ...]
    masked: bool
    told: tuple[str, ...]  # what they are, for the site's own log


class Holdings:
    """The data of one site. The last reading is kept in memory."""

    def __init__(self, folder: SiteFolder, name: str, options: Mapping[str, Any]) -> None:
        self._folder, self._name, self._options = folder, name, dict(options)
        shares = folder.statistics.val, folder.statistics.test
        self.division = SiteDivision(folder.path, folder.name, shares)
        self._read: tuple[tuple[str, Scale, Fold | None], Dataset] | None = None
        self._codes: dict[str, dict[str, str]] = {}

    # ---- what is read --------------------------------------------------------------------------

    @cached_property
    def _source(self) -> SiteSource:
        try:
            return site_source(self._name, self._options, self._prepared)
        except ConfigError as error:  # of its own options: not for the coordinator
            raise DataError(str(error)) from error

    def _prepared(self, sheet: Sheet) -> Sheet:
        """The cells as the owner lets them be told: columns, bounds, and texts."""
        table, folder = sheet.table, self._folder
        for name in (*folder.levels, *folder.ranges):
            if name not in table.column_names:
                raise DataError(
                    f"site.toml: [levels] or [ranges] name the column '{name}'; expected one of "
                    f"{', '.join(table.column_names)}"
                )
        roles = {self._options.get(role) for role in ROLES}
        for at, name in reversed([*enumerate(table.column_names)]):
            if folder.policy.columns and name not in {*folder.policy.columns} | roles:
                table = table.remove_column(at)
            elif name in folder.ranges:
                table = table.set_column(at, name, self._cut(sheet, name))
            elif folder.levels.get(name, "named") != "named":
                table = table.set_column(at, name, self._renamed(table.column(name), name))
        return sheet._replace(table=table)

    def _cut(self, sheet: Sheet, name: str) -> pa.Array:
        values, (low, high) = numbers(sheet, name), self._folder.ranges[name]
        if values is None or low >= high:
            raise DataError(
                f"site.toml: ranges.{name}: found [{low}, {high}]; expected two ascending bounds "
                "of a column of numbers"
            )
        return pa.array(values.clip(low, high), from_pandas=True)

    def _renamed(self, column: pa.ChunkedArray, name: str) -> pa.Array:
        """The texts of a column as hashes, or as the agreed ones and 'other'."""
        how, salt = self._folder.levels[name], self._folder.statistics.salt
        if how == "hashed" and len(salt) < 8:
            raise DataError(
                f"site.toml: levels.{name} is 'hashed'; expected a word of at least 8 letters in "
                "[statistics] salt, the same at all sites, which the coordinator does not know"
            )

        agreed = how if isinstance(how, Mapping) else dict(zip(how, how, strict=True))

        def told(text: str) -> str:
            if how == "hashed":
                return hmac.digest(salt.encode(), f"{name}\0{text}".encode(), "sha256").hex()[:12]
            return agreed.get(text, OTHER)

        cells = column.cast(pa.string()).to_pylist()
        self._codes[name] = known = {cell: told(cell) for cell in cells if cell is not None}
        return pa.array([known.get(cell) for cell in cells], pa.string())

    @property
    def codes(self) -> Mapping[str, Mapping[str, str]]:
        """What this site's texts are told as, by column, where that is not as they are."""
        assert self._source
        return self._codes

    @cached_property
    def keys(self) -> list[bytes]:
        """The keyed hash of every row."""
        return row_keys(self._source, self._folder.secret())

    @cached_property
    def parts(self) -> Tensor:
        """The part of every row."""
        return self.division.parts(self._plain, self.keys)

    @cached_property
    def _plain(self) -> Dataset:
        """The rows with what divides them: their classes, units and times."""
        source = self._source
        if source.table is None:
            assert source.samples is not None
            return source.samples
        some = tuple(column for column in source.schema.columns if column.kind != "empty")[:1]
        plain = encode_table(source.table, some, source.table.target)
        return replace(plain, fixed=source.table.fixed)

    @cached_property
    def schema(self) -> Schema:
        """What the site's data says by itself; refuses texts that may name patients."""
        schema, rows = self._source.schema, len(self.keys)
        texts = {column.name: column.levels for column in schema.columns if column.levels}
        if schema.target.kind == "texts" and schema.kind == "table":
            texts[schema.target.name] = schema.target.classes
        for name, levels in texts.items():
            if len(levels) * ROWS_PER_LEVEL > rows:
                raise DataError(
                    f"column '{name}' has {len(levels)} different texts in {rows} rows; expected "
                    f"at least {ROWS_PER_LEVEL} rows for each, because texts leave the site: "
                    "merge them by a list in [levels], or leave the column out with data.drop"
                )
        return replace(schema, parts=tuple(self.parts.unique().tolist()))

    def unnamed_texts(self) -> dict[str, dict[str, int]]:
        """Texts that would leave and that [levels] does not decide about, with their rows."""
        table = self._source.table
        if table is None:
            return {}
        schema, found = self.schema, {}
        names = [column.name for column in schema.columns if column.levels]
        names += [schema.target.name] if schema.target.kind == "texts" else []
        for name in names:
            if name not in self._folder.levels:
                counted = table.sheet.table.column(name).cast(pa.string()).value_counts()
                pairs = [(each["values"], each["counts"]) for each in counted.to_pylist()]
                found[name] = {str(text): count for text, count in pairs}
        return found

    # ---- what is told --------------------------------------------------------------------------

    def facts(self, schema: Schema, scale: Scale, fold: Fold | None = None) -> SiteFacts:
        """Counts and keyed hashes of the site's data."""
        held = self.federation(schema, scale, fold=fold)
        (train,), (val,), (test,) = held.train, held.val, held.test
        secret = self._folder.secret()
        seal = Seal(*(hmac.digest(secret, one.encode(), "sha256").hex() for one in held.seals[0]))
        counts = SiteCounts(len(train), len(val), len(test))
        return SiteFacts(counts, seal, lack(held, 0))

    def classes(self, schema: Schema, scale: Scale) -> tuple[int, ...]:
        """The samples of each class that are no test samples, as far as they may leave.

        They are sums as others are: of enough rows, and of the same ones or of enough others.
        """
        if schema.regression:
            return ()
        held, least = self.federation(schema, scale), self._folder.statistics.rows
        rows = torch.cat([held.train[0], held.val[0]])
        y, names = held.dataset.y[rows], [f"class {name}" for name in schema.target.classes]
        known = (y[:, None] == torch.arange(len(names))).numpy()
        of = Columns(names, [self.keys[at] for at in rows.tolist()], known, {})
        may = self.division.release(of, least, CLASSES).allowed
        return told_counts(known.sum(0).tolist(), may.tolist())

    def sums(self, schema: Schema, scale: Scale, asked: Approval) -> SentSums | None:
        """The site's part of the means and deviations; None if nothing is standardised."""
        held = self.federation(schema, scale)
        data, train, rule = held.dataset, held.train[0], self._folder.statistics
        if data.numeric is None:
            return None
        if schema.regression and self.schema.target.classes and not self._folder.consent.counts:
            raise ForbiddenError(
                "refused",
                "the sum of the target would tell how many rows each of its classes has; name "
                "data.task = 'regression' in [data] of site.toml, or consent to [consent] counts",
            )
        names = _names(schema, data.numeric)
        rows = numeric_rows(data.x, data.y, data.numeric, schema.regression)[train]
        bounds = {name: [*self._folder.ranges.get(name, ())] for name in names}
        known, trained = ~rows.isnan().numpy(), [self.keys[at] for at in train.tolist()]
        release = self.division.release(Columns(names, trained, known, bounds), rule.rows)
        found = sums_of(rows, release.allowed)
        if rule.noise:
            found = noisy(
                found, self._bounds(names), rule.noise, self._folder.secret(), release.number
            )
        numbers = found.numbers
        if rule.masked:
            clients, secret = asked.request.clients, self._folder.secret()
            shared = self.shared_secrets(clients)
            if len(shared) < 2:
                raise DataError(
                    f"site.toml: [statistics] masked needs two other sites; found {len(shared)}"
                )
            # other columns, or another order, have masks of their own: equal ones would cancel
            context = json.dumps([asked.request.id, names])
            plain = hmac.digest(secret, repr(numbers).encode(), "sha256").hex()
            self.division.mask(context, clients, plain, by_hand=asked.by_hand)
            numbers = tuple(masked(found, self._folder.name, shared, context.encode()))
        told = [f"{n}: {k} values" for n, k in zip(names, found.known, strict=True) if k]
        left_out = [n for n, k in zip(names, found.known, strict=True) if not k]
        if left_out:
            told.append(f"left out, too few values: {', '.join(left_out)}")
        return SentSums(to_hex(numbers), rule.masked, tuple(told))

    def _bounds(self, names: list[str]) -> dict[str, tuple[float, float]]:
        missing = [name for name in names if name not in self._folder.ranges]
        if missing:
            raise DataError(
                f"site.toml: [statistics] noise needs bounds in [ranges] for {', '.join(missing)}"
            )
        return {name: self._folder.ranges[name] for name in names}

    def shared_secrets(self, clients: tuple[str, ...]) -> dict[str, bytes]:
        """The secrets with all other sites; their keys come from this site's owner alone."""
        others = [name for name in clients if name != self._folder.name]
        missing = [name for name in others if name not in self._folder.partners]
        if missing:
            raise ConfigError(
                f"site.toml: masks and seals need the box key of each other site in [partners]; "
                f"found none of {', '.join(missing)}"
            )
        own = self._folder.box_key()
        return {name: keys.shared_secret(own, self._folder.partners[name]) for name in others}

    # ---- what stays ----------------------------------------------------------------------------

    def shards(self, experiment: Experiment) -> Shards:
        """The site's samples as one client of the experiment."""
        agreement, config, problem = experiment.agreement, experiment.config, experiment.problem
        made = simulate(
            self.federation(
                agreement.schema, config.data.scale, agreement.moments, config.fold(problem.seed)
            ),
            problem.factory,
            problem.recipe,
            seed=problem.seed,
            dtype=problem.dtype,
            merge_val=experiment.merged,
            shares=METRICS[config.run.metric].by_share,
        )
        return made.shards.placed(problem.clients.index(self._folder.name), problem.population)

    def judged(self, experiment: Experiment) -> JudgedRows | None:
        """The subgroups of the site's test samples; None if its data names no column for them."""
        if "subgroup" not in self._options:
            return None
        schema, config = experiment.agreement.schema, experiment.config
        fold = config.fold(config.run.seed)
        return JudgedRows.of(self.federation(schema, config.data.scale, fold=fold))

    def export(self, out: Path) -> Path:
        """Write the site's data as it uses it, with the part of each row, for a simulation."""
        names, source = np.array(SPLITS), self._source
        parts = self.parts.numpy()
        if source.table is None:
            assert source.samples is not None
            samples, path = source.samples, out.with_suffix(".npz")
            held = [(name, torch.from_numpy(parts == at)) for at, name in enumerate(SPLITS)]
            arrays = {f"x_{name}": samples.x[rows].numpy() for name, rows in held if rows.any()}
            arrays |= {f"y_{name}": samples.y[rows].numpy() for name, rows in held if rows.any()}
            if samples.class_names:
                arrays["class_names"] = np.array(samples.class_names, dtype=str)
            with files.whole(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            return path
        table, path = source.table.sheet.table, out.with_suffix(".csv")
        gone = [self._options[role] for role in ("time", "split") if role in self._options]
        table = table.drop_columns([name for name in gone if name is not None])
        with files.whole(path) as temporary:
            pacsv.write_csv(table.append_column(PART, pa.array(names[parts])), temporary)
        return path

    def federation(
        self,
        schema: Schema,
        scale: Scale,
        moments: Moments | None = None,
        fold: Fold | None = None,
    ) -> Federation:
        """The site's rows, divided as it divided them, or as one of its folds."""
        data = self._dataset(schema, scale, fold)
        name = self._folder.name
        if fold is not None:  # it has all parts
            schema = replace(schema, parts=(TRAIN, VALIDATION, TEST))
        return site_federation(data, schema, name, val=0.0, test=0.0, seed=0, moments=moments)

    def _dataset(self, schema: Schema, scale: Scale, fold: Fold | None) -> Dataset:
        key = schema.hash, scale, fold
        if self._read is None or self._read[0] != key:
            made = read_with(self._name, self._options, schema, scale, self._source)
            parts = self.parts  # refused if its rows are others than before
            if fold is not None:
                parts = self.division.fold(self._plain, self.keys, fold)
            self._read = key, replace(made, fixed=parts, times=None)
        return self._read[1]


def told_counts(counts: Sequence[int], may: Sequence[bool]) -> tuple[int, ...]:
    """The samples of each class as they leave: 0 of a class that may not.

    The number of all samples leaves too, so that a single hidden class takes the smallest other
    one with it.
    """
    hidden = {at for at, n in enumerate(counts) if n and not may[at]}
    if len(hidden) == 1:
        others = [at for at, n in enumerate(counts) if n and may[at]]
        hidden |= {min(others, key=counts.__getitem__)} if others else set()
    return tuple(0 if at in hidden else n for at, n in enumerate(counts))


def _names(schema: Schema, numeric: Tensor) -> list[str]:
    """The names of the columns that sums are of."""
    named = schema.feature_names or tuple(map(str, range(len(numeric))))
    names = [name for name, number in zip(named, numeric.tolist(), strict=True) if number]
    return [*names, schema.target.name or "target"] if schema.regression else names
