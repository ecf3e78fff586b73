"""Sites that agree on one schema read what a reader of all their files together would read."""

import json
import string
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import PARTITIONS, federate, load
from coterie.data.data_schema import Schema, client_order
from coterie.data.merging import merged
from coterie.data.site_data import local_schema, read_with, site_federation
from coterie.data.sources.columns import InputColumn, TargetColumn
from coterie.data.standard import (
    Moments,
    apply,
    means_of,
    moments_of,
    site_squares,
    site_sums,
)
from coterie.errors import ConfigError, CoterieWarning, DataError

NATURAL = PARTITIONS["natural"]()
NAMES = ("a", "a-b", "B", "north", "north_2")
SHARES = {"val": 0.3, "test": 0.2, "seed": 5}


# Random tables, divided over sites


def numbers(rng, n, site):
    return [f"{v:.3g}" for v in rng.normal(5, 3, n)]


def sparse(rng, n, site):
    """Numbers that are missing in every row of some sites, and in no row of others."""
    share = rng.choice([0.0, 0.3, 1.0])
    return [("" if rng.random() < share else str(int(v))) for v in rng.integers(-9, 9, n)]


def words(rng, n, site):
    """Categories, some of which only one site has."""
    share = rng.choice([0.0, 0.2, 1.0])
    known = ["f", "m", f"only {site}", "é", "Z"]
    return ["NA" if rng.random() < share else str(rng.choice(known)) for _ in range(n)]


TARGETS = {
    "few": lambda rng, n: [str(v) for v in rng.integers(0, rng.integers(1, 4), n)],
    "many": lambda rng, n: [str(v) for v in rng.integers(0, rng.integers(1, 40), n)],
    "texts": lambda rng, n: [str(v) for v in rng.choice(["ill", "well", "dead"], n)],
    "mixed": lambda rng, n: [str(v if rng.random() < 0.9 else v / 2) for v in rng.integers(0, 9, n)],
    "reals": lambda rng, n: [f"{v:.4g}" for v in rng.normal(70, 9, n)],
}
ROLES = {
    "": lambda rng, n: [],
    "unit": lambda rng, n: [str(v) for v in rng.integers(0, max(n // 2, 1), n)],
    "time": lambda rng, n: [f"2026-05-{v:02d}" for v in rng.integers(1, 28, n)],
    "split": lambda rng, n: [
        str(v) for v in rng.choice(["train", "Val", "test"][: rng.integers(1, 4)], n)
    ],
}


def tables(rng, sites, kinds, target, role):
    """One table per site, with its columns in an order of its own."""
    found = {}
    for site in sites:
        n = int(rng.integers(1, 12)) + (10 if site == sites[0] else 0)
        table = {f"c{i}": kind(rng, n, site) for i, kind in enumerate(kinds)}
        table["y"] = TARGETS[target](rng, n)
        if role:
            table[role] = ROLES[role](rng, n)
        order = rng.permutation(list(table)).tolist()
        found[site] = {name: table[name] for name in order}
    return found


def typed(column):
    """A column as parquet files hold it: float64, or text where cells are no numbers."""
    cells = [None if cell in ("", "NA") else cell for cell in column]
    try:
        return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())
    except ValueError:
        return pa.array(cells, pa.string())


def write(path, table, parquet):
    if parquet:
        pq.write_table(pa.table({k: typed(column) for k, column in table.items()}), path)
        return
    rows = zip(*table.values(), strict=True)
    path.write_text("\n".join(",".join(row) for row in [list(table), *rows]) + "\n")


def agreed(files, options):
    """The schema, each site's federation, all by messages as sites would send them."""
    schemas = {site: local_schema(str(file), options) for site, file in files.items()}
    schemas = {site: Schema.from_json(schema.to_json()) for site, schema in schemas.items()}
    schema = merged(schemas)
    raw = {site: read_with(str(file), options, schema) for site, file in files.items()}
    made = {site: site_federation(raw[site], schema, site, **SHARES) for site in files}
    if schema.numeric is None:
        return schema, made
    order = client_order(files)
    means = means_of([site_sums(raw[site], made[site].train[0]) for site in order])
    squares = [site_squares(raw[site], made[site].train[0], means) for site in order]
    moments = Moments.from_json(moments_of(means, squares, schema.regression).to_json())
    return schema, {
        site: site_federation(raw[site], schema, site, **SHARES, moments=moments) for site in files
    }


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def refuse_differences(pooled, schema, made):
    """The sites' own federations are the pooled one, client by client, bit for bit."""
    assert pooled.clients == client_order(made)
    assert pooled.dataset.class_names == schema.target.classes
    assert pooled.dataset.x.shape[1:] == schema.example().x.shape[1:]
    assert pooled.dataset.x.dtype == schema.example().x.dtype
    for i, site in enumerate(pooled.clients):
        own = made[site]
        rows = torch.cat([pooled.train[i], pooled.val[i], pooled.test[i]]).sort().values
        assert same_bits(pooled.dataset.x[rows], own.dataset.x)
        assert same_bits(pooled.dataset.y[rows], own.dataset.y)
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(pooled, part)[i], rows[getattr(own, part)[0]])
        for field in ("scale", "shift"):
            whole, one = getattr(pooled.dataset, field), getattr(own.dataset, field)
            assert whole is None and one is None or same_bits(whole, one)
        for field in ("classes", "class_names", "feature_names", "target_scale", "target_shift"):
            assert getattr(pooled.dataset, field) == getattr(own.dataset, field)
        assert pooled.seals[i] == own.seals[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 5),
    kinds=st.lists(st.sampled_from([numbers, sparse, words]), min_size=1, max_size=3),
    target=st.sampled_from(sorted(TARGETS)),
    role=st.sampled_from(sorted(ROLES)),
    task=st.sampled_from(["auto", "auto", "classification", "regression"]),
)
def test_sites_read_what_the_reader_of_all_files_reads(seed, count, kinds, target, role, task):
    rng = np.random.default_rng(seed)
    sites = rng.permutation(NAMES)[:count].tolist()
    options = {"target": "y", "task": task, **({role: role} if role else {})}
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for site, table in tables(rng, sites, kinds, target, role).items():
            parquet = rng.random() < 0.3
            files[site] = Path(folder, f"{site}.{'parquet' if parquet else 'csv'}")
            write(files[site], table, parquet)
        try:
            pooled = federate(load(folder, **options), NATURAL, **SHARES)
        except DataError:
            with pytest.raises(DataError):
                _, made = agreed(files, options)
                if not any(len(one.train[0]) for one in made.values()):
                    raise DataError("no client has training data") from None
            return
        refuse_differences(pooled, *agreed(files, options))


# Arrays


def arrays(rng, kind, target, n):
    x = {
        "images": lambda: rng.integers(0, 256, (n, 5, 4), np.uint8),
        "tokens": lambda: rng.integers(0, rng.integers(2, 30), (n, 6)),
        "features": lambda: rng.normal(3, 2, (n, 3)).astype(np.float32),
        "volumes": lambda: rng.normal(3, 2, (n, 2, 3)).astype(np.float32),
    }[kind]()
    y = {
        "integers": lambda: rng.integers(0, rng.integers(1, 13), n),
        "texts": lambda: rng.choice(["10", "9", "x"][: rng.integers(1, 4)], n),
        "reals": lambda: rng.normal(0, 1, n),
    }[target]()
    return x, y


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 4),
    kind=st.sampled_from(["images", "tokens", "features", "volumes"]),
    target=st.sampled_from(["integers", "texts", "reals"]),
    divided=st.booleans(),
)
def test_sites_read_arrays_as_if_they_were_in_one_file(seed, count, kind, target, divided):
    rng = np.random.default_rng(seed)
    sites = client_order(rng.permutation(NAMES)[:count].tolist())
    parts = ("_train", "_test") if divided else ("",)
    if kind == "tokens" and target == "texts":
        target = "integers"  # names of classes are not matched for tokens
    with tempfile.TemporaryDirectory() as folder:
        files, whole = {}, {"client_names": np.array(sites)}
        held = {part: [] for part in parts}
        for i, site in enumerate(sites):
            own = {part: arrays(rng, kind, target, int(rng.integers(3, 9))) for part in parts}
            for part, (x, y) in own.items():
                held[part].append((x, y, np.full(len(y), i)))
            files[site] = Path(folder, f"{site}.npz")
            plain = {f"{k}{p}": v for p, xy in own.items() for k, v in zip("xy", xy, strict=True)}
            np.savez(files[site], **plain)
        for part, found in held.items():
            x, y, owner = (np.concatenate(column) for column in zip(*found, strict=True))
            whole |= {f"x{part}": x, f"y{part}": y, f"client{part}": owner}
        np.savez(Path(folder, "whole.npz"), **whole)
        try:
            data = load(str(Path(folder, "whole.npz")))
        except DataError:
            if target == "texts" or not y.max():  # the others' numbers are from 0 to their class
                with pytest.raises(DataError, match="every sample of every site has the class"):
                    agreed(files, {})
            return
        refuse_differences(federate(data, NATURAL, **SHARES), *agreed(files, {}))
