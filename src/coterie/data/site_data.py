"""One site's own data: its schema, its samples encoded by the common schema, and its splits.

For sites that agree on one schema (:func:`coterie.data.data_schema.merged`) this gives bit for bit
the samples and splits that reading all sites' files together would give each of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..errors import DataError
from .arrays import TEST, VALIDATION, Scale, normalisation, scaled
from .data_schema import Schema, refuse_unfinished, union
from .datasets import DATASETS, Kept, file_source, kept_part, load
from .federation import Dataset, Federation
from .partition import three_ways
from .partitions.base import Natural
from .sources import sheets
from .sources.sheets import Sheet, describe_target
from .sources.tables import OpenTable, TableOptions, describe_inputs, encode_table, open_table
from .standard import Moments, apply, with_unknown


class SiteSource(NamedTuple):
    """A site's data as it was read: an open table, or samples."""

    schema: Schema  # what the data says by itself
    table: OpenTable | None
    samples: Dataset | None
    part: Kept
    original: Sheet | None = None  # the table's cells as they are in the file


def read_with(
    name: str,
    options: Mapping[str, Any],
    schema: Schema,
    scale: Scale = "auto",
    source: SiteSource | None = None,
) -> Dataset:
    """A site's own samples, encoded by the schema that all sites agreed on."""
    refuse_unfinished(schema)
    source = source or site_source(name, options)
    _refuse_uncovered(name, source.schema, schema)
    if source.table is not None:
        made = encode_table(source.table, schema.columns, schema.target)
        return scaled(kept_part(made, source.part), scale)
    assert source.samples is not None
    return recoded(source.samples, schema, scale)


def site_federation(
    dataset: Dataset,
    schema: Schema,
    client: str,
    *,
    val: float,
    test: float,
    seed: int,
    moments: Moments | None = None,
) -> Federation:
    """The federation of one client that holds all samples of a site, standardised if moments are.

    A source that divides its samples itself is used as it says; the parts that another site's
    source has are not drawn at random here, either.
    """
    rows = torch.arange(len(dataset.y))
    pool, held, given = rows, None, False
    if dataset.fixed is not None and schema.parts is not None:
        is_test = dataset.fixed == TEST
        pool, held = rows[~is_test], rows[is_test] if TEST in schema.parts else None
        given = VALIDATION in schema.parts
    splits = three_ways(dataset, client, pool, held, (val, test), seed, given)
    train, validation, tested = ((part,) for part in splits)
    ready = with_unknown(dataset, (client,), train)
    return Federation(
        dataset=ready if moments is None else apply(ready, moments),
        partition=repr(Natural()),
        clients=(client,),
        train=train,
        val=validation,
        test=tested,
        source=dataset,
    )


def site_source(
    name: str, options: Mapping[str, Any], prepare: Callable[[Sheet], Sheet] | None = None
) -> SiteSource:
    """Read and describe what ``[data]`` names; ``prepare`` rewrites the cells of a table.

    One class, few rows, or a column without any value are accepted: other sites may have more.
    """
    if name in DATASETS:
        found = load(name, **options)
        return SiteSource(Schema.of(found), None, found, "all")
    source = file_source(name, **options)
    if source.format != "table":
        found = kept_part(source.read(), source.part)
        return SiteSource(Schema.of(found), None, found, source.part)
    table = open_table(source.path, TableOptions(**source.options), 1)
    original = table.sheet
    if prepare is not None:
        sheet, told = prepare(original), table.options
        target = describe_target(sheet, str(told.target), told.task)
        table = table._replace(sheet=sheet, target=target)
    parts = table.fixed
    if parts is not None and source.part != "all":
        parts = None if source.part == "pooled" else parts[parts != TEST]
    schema = Schema(
        "table",
        table.target,
        columns=tuple(describe_inputs(table)),
        parts=None if parts is None else tuple(parts.unique().tolist()),
    )
    return SiteSource(schema, table, None, source.part, original)


def _refuse_uncovered(name: str, own: Schema, schema: Schema) -> None:
    """Refuse data that does not fit into the agreed schema: it has changed since, or is another.

    Categories that are new since are told of, and count as unknown.
    """
    wider = union({"the agreed schema": schema, "this site's data": own})
    pairs = list(zip(schema.columns, wider.columns, strict=True))
    for old, new in pairs:
        if old.levels and (unknown := [*{*new.levels} - {*old.levels}]):
            sheets.warn_unknown(name, old, sorted(unknown))
    same = tuple(replace(new, levels=old.levels) if old.levels else new for old, new in pairs)
    if replace(wider, columns=same) == schema:
        return
    told = [f"column '{new.name}' now has missing cells" for old, new in pairs if old != new]
    raise DataError(
        f"{name}: does not fit the schema that the sites agreed on: "
        + (", ".join(told[:5]) or "it has other classes, tokens or parts")
        + "; undo the change, or start a new experiment, in which the sites agree again"
    )


def recoded(dataset: Dataset, schema: Schema, scale: Scale = "auto") -> Dataset:
    """Samples with the common class numbers, number of channels and pixel scale."""
    y, names, x = dataset.y, schema.target.classes, dataset.x
    if not schema.regression:
        place = {name: number for number, name in enumerate(names)}
        own = dataset.class_names or tuple(str(c) for c in range(dataset.classes))
        for name in (own[c] for c in y.unique().tolist() if own[c] not in place):
            raise DataError(
                f"{dataset.name}: found the class '{name}'; expected one of {', '.join(names)}"
            )
        y = torch.tensor([place.get(name, -1) for name in own])[y]
    if schema.kind == "images":
        x = x.expand(len(x), *schema.shape).contiguous()
    ready = scaled(dataset, scale)  # refuses a pixel scale for data without pixels
    factor, shift = normalisation(schema.pixels, x, scale)
    same = names == dataset.class_names
    return replace(
        ready,
        x=x,
        y=y,
        classes=len(names),
        class_names=names,
        superclass=dataset.superclass if same else None,
        scale=factor,
        shift=shift,
    )
