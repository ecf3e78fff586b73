"""Sites that agree on one schema read what a reader of all their files together would read."""

import io
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
from coterie.data.data_schema import Schema, client_order, merged
from coterie.data.site_data import read_with, site_federation, site_source
from coterie.data.sources.sheets import InputColumn, TargetColumn
from coterie.data.standard import Moments, apply, means_of, moments_of, site_squares, site_sums
from coterie.errors import ConfigError, CoterieWarning, DataError
from coterie.networks import registry

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
    "mixed": lambda rng, n: [
        str(v if rng.random() < 0.9 else v / 2) for v in rng.integers(0, 9, n)
    ],
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
    schemas = {site: site_source(str(file), options).schema for site, file in files.items()}
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


def refused(files, options):
    """Whether the sites cannot agree, or nobody has training data."""
    try:
        _, made = agreed(files, options)
    except DataError:
        return True
    return not any(len(one.train[0]) for one in made.values())


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def refuse_differences(pooled, schema, made):
    """The sites' own federations are the pooled one, client by client, bit for bit."""
    assert pooled.clients == client_order(made)
    assert pooled.dataset.class_names == schema.target.classes
    assert pooled.dataset.x.shape[1:] == schema.example().x.shape[1:]
    assert pooled.dataset.x.dtype == schema.example().x.dtype
    if schema.kind == "tokens":
        assert schema.tokens == int(pooled.dataset.x.max()) + 1
    for i, site in enumerate(pooled.clients):
        own = made[site]
        rows = torch.cat([pooled.train[i], pooled.val[i], pooled.test[i]]).sort().values
        assert same_bits(pooled.dataset.x[rows], own.dataset.x)
        assert same_bits(pooled.dataset.y[rows], own.dataset.y)
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(pooled, part)[i], rows[getattr(own, part)[0]])
        for field in ("scale", "shift"):
            whole, one = getattr(pooled.dataset, field), getattr(own.dataset, field)
            assert (whole is None and one is None) or same_bits(whole, one)
        for field in ("classes", "class_names", "feature_names", "target_scale", "target_shift"):
            assert getattr(pooled.dataset, field) == getattr(own.dataset, field)
        assert pooled.seals[i] == own.seals[0]


@settings(max_examples=60)
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
            assert refused(files, options)
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


@settings(max_examples=30)
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


def test_image_folders_of_grey_and_colour_sites_are_read_as_one_folder(tmp_path, monkeypatch):
    import coterie.data.sources.images as images

    monkeypatch.setattr(images, "decode", lambda content, _: np.load(io.BytesIO(content)))
    rng = np.random.default_rng(0)
    held = {"a": ("ill", "well"), "b": ("well",), "c": ("dead", "ill")}
    for site, classes in held.items():
        for i in range(12):
            pixels = rng.integers(0, 256, (4, 4, 3) if site == "b" else (4, 4), np.uint8)
            for root in (tmp_path / "all", tmp_path / f"at_{site}"):
                file = root / site / classes[i % len(classes)] / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as stream:
                    np.save(stream, pixels)
    pooled = federate(load(str(tmp_path / "all")), NATURAL, **SHARES)
    schema, made = agreed({site: tmp_path / f"at_{site}" for site in held}, {})
    assert schema.shape == (3, 4, 4)
    refuse_differences(pooled, schema, made)


def test_the_pixel_scale_is_the_agreed_one(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("mnist", "mine"):
        x, y = rng.integers(0, 256, (6, 4, 4), np.uint8), np.arange(6) % 2
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    schemas = {n: site_source(str(tmp_path / f"{n}.npz"), {}).schema for n in ("mnist", "mine")}
    assert schemas["mnist"].pixels == "mnist"
    with pytest.raises(DataError, match=r"pixel scale differs: found '' at mine; 'mnist' at mnist"):
        merged(schemas)
    other = replace(schemas["mine"], pixels="mnist")
    for scale in ("auto", "unit", "standard"):
        found = read_with(str(tmp_path / "mnist.npz"), {}, other, scale)
        assert same_bits(found.scale, load(str(tmp_path / "mnist.npz"), scale=scale).scale)


def test_the_part_that_is_left_out_is_left_out_at_every_site(tmp_path):
    head = "c,part,y\n"
    (tmp_path / "a.csv").write_text(head + "1,train,u\n2,val,v\n3,test,u\n4,train,v\n" * 3)
    (tmp_path / "b.csv").write_text(head + "1,train,u\n2,test,v\n" * 4)
    options = {"target": "y", "split": "part", "part": "train"}
    pooled = federate(load(str(tmp_path), **options), NATURAL, **SHARES)
    assert len(pooled.val[1]) == 0  # validation data is given at a
    refuse_differences(pooled, *agreed({s: tmp_path / f"{s}.csv" for s in "ab"}, options))


# Merging

NUMBER = InputColumn("age", "numbers")
SEX = InputColumn("sex", "levels", levels=("f", "m"))
CLASSES = TargetColumn("y", "texts", ("ill", "well"))
TABLE = Schema("table", CLASSES, (NUMBER, SEX))
IMAGES = Schema("images", TargetColumn("", "integers", ("0", "1")), shape=(1, 8, 8))

texts = st.text(string.ascii_letters + "é(). ", min_size=1, max_size=4)
some_columns = st.one_of(
    st.builds(lambda m: ("numbers", m, ()), st.booleans()),
    st.builds(lambda s: ("levels", False, tuple(sorted(s))), st.sets(texts, min_size=1)),
    st.just(("empty", True, ())),
)
some_targets = st.one_of(
    st.just(TargetColumn("y", "quantity")),
    st.builds(
        lambda s: TargetColumn("y", "integers", tuple(sorted(map(str, s)))),
        st.sets(st.integers(0, 40), min_size=1, max_size=20),
    ),
    st.builds(lambda s: TargetColumn("y", "texts", tuple(sorted(s))), st.sets(texts, min_size=1)),
)
some_tables = st.builds(
    lambda columns, target, parts: Schema(
        "table",
        target,
        tuple(InputColumn(f"c{i}", *column) for i, column in enumerate(columns)),
        parts=parts,
    ),
    st.lists(some_columns, min_size=1, max_size=3),
    some_targets,
    st.none() | st.builds(lambda s: tuple(sorted(s)), st.sets(st.integers(0, 2))),
)
some_arrays = st.sampled_from(
    [
        IMAGES,
        replace(IMAGES, shape=(3, 8, 8), target=TargetColumn("", "texts", ("a", "b"))),
        replace(IMAGES, target=TargetColumn("", "texts", ("b", "a")), pixels="mnist"),
        Schema("tokens", TargetColumn("", "integers", ("0", "1", "2")), shape=(7,), tokens=9),
        Schema("features", TargetColumn("", "quantity"), shape=(3,), parts=(0, 2)),
    ]
)


@given(st.one_of(some_tables, some_arrays))
def test_json_gives_the_same_schema_back(schema):
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.hash == schema.hash
    assert len(schema.hash) == 64


def outcome(schemas):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoterieWarning)
        try:
            return merged(schemas)
        except DataError as error:
            return str(error)


@given(st.lists(some_tables, min_size=1, max_size=4), st.randoms())
def test_the_order_of_the_sites_does_not_matter(schemas, random):
    named = list(zip(NAMES, schemas, strict=False))
    found = outcome(dict(named))
    random.shuffle(named)
    assert outcome(dict(named)) == found
    if isinstance(found, Schema):
        assert outcome({**dict(named), "z": found}) == found  # nothing is added by the common one


def changed(schema, at, **fields):
    columns = list(schema.columns)
    columns[at] = replace(columns[at], **fields)
    return replace(schema, columns=tuple(columns))


MANY = tuple(sorted(f"l{i:03d}" for i in range(60)))
DISAGREE = {
    "extra column": (
        replace(TABLE, columns=(*TABLE.columns, InputColumn("dose", "numbers"))),
        r"columns differ: 'dose' is at south and not at north.*data\.drop",
    ),
    "missing column": (
        replace(TABLE, columns=(NUMBER,)),
        r"columns differ: 'sex' is at north and not at south.*data\.drop",
    ),
    "text and numbers": (
        changed(TABLE, 0, kind="levels", levels=("(missing)", "old")),
        r"'age' is numbers at north and text at south \(such as 'old' at south\).*data\.categories",
    ),
    "other kind": (IMAGES, r"kind of data differs: found 'table' at north; 'images' at south"),
    "other target": (
        replace(TABLE, target=replace(CLASSES, name="z")),
        r"target column \(data\.target\) differs: found 'y' at north; 'z' at south",
    ),
    "classes by text and by number": (
        replace(TABLE, target=TargetColumn("y", "integers", ("0", "1"))),
        r"numbers at south and classes by text at north \(such as 'ill' at north\)",
    ),
}


@pytest.mark.parametrize("case", sorted(DISAGREE))
def test_sites_that_disagree_are_named_with_what_to_do(case):
    other, message = DISAGREE[case]
    with pytest.raises(DataError, match=message):
        merged({"south": other, "north": TABLE})


ARRAYS_DISAGREE = {
    "shape": (replace(IMAGES, shape=(1, 9, 8)), r"shape of a sample \(data.size.*'1x8x8' at a"),
    "task": (replace(IMAGES, target=TargetColumn("", "quantity")), "task .* differs"),
    "order of classes": (
        replace(IMAGES, target=TargetColumn("", "texts", ("z", "a", "b"))),
        "classes at a are not those of the other sites.*same class_names",
    ),
}


@pytest.mark.parametrize("case", sorted(ARRAYS_DISAGREE))
def test_arrays_that_disagree_are_refused(case):
    other, message = ARRAYS_DISAGREE[case]
    with pytest.raises(DataError, match=message):
        merged({"a": IMAGES, "b": other})


def test_what_one_site_lacks_and_nobody_has():
    one = replace(TABLE, target=replace(CLASSES, classes=("ill",)))
    assert merged({"a": one, "b": TABLE}) == TABLE
    with pytest.raises(DataError, match="every site has the class 'ill' in column 'y'"):
        merged({"a": one, "b": one})
    empty = changed(TABLE, 1, kind="empty", missing=True, levels=())
    assert merged({"a": empty, "b": TABLE}).columns[1].levels == ("(missing)", "f", "m")
    with pytest.raises(DataError, match=r"'sex' is empty in every row of every site.*data\.drop"):
        merged({"a": empty, "b": empty})
    with pytest.raises(DataError, match="no site has a sample marked as train"):
        merged({"a": replace(TABLE, parts=(2,)), "b": replace(TABLE, parts=(1,))})


def test_too_many_levels_together_are_refused_and_warned_of_if_spelt_alike():
    one, other = (
        changed(TABLE, 1, levels=tuple(f"{c}{level}" for level in MANY)) for c in ("x", "y")
    )
    with pytest.raises(DataError, match=r"'sex' holds 120 different texts at a, b together"):
        merged({"a": one, "b": other})
    with pytest.warns(CoterieWarning, match="column 'sex' holds 'F ' and 'f'"):
        merged({"a": changed(TABLE, 1, levels=("F ", "m")), "b": TABLE})
    with pytest.warns(CoterieWarning, match="the target holds 'Ill' and 'ill'"):
        merged({"a": replace(TABLE, target=replace(CLASSES, classes=("Ill", "well"))), "b": TABLE})


def test_whole_numbers_of_all_sites_together_may_be_a_quantity():
    few, more = (
        replace(TABLE, target=TargetColumn("y", "integers", tuple(sorted(map(str, numbers)))))
        for numbers in (range(15), range(10, 25))
    )
    assert len(merged({"a": few, "b": few}).target.classes) == 15
    assert merged({"a": few, "b": more}).regression


# Data that changed, and messages of an attacker


def test_data_that_no_longer_fits_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("age,sex,y\n50,f,ill\n60,m,well\n")
    options = {"target": "y"}
    schema = merged({"a": site_source(str(path), options).schema, "b": TABLE})
    read_with(str(path), options, schema)
    for content, message in (
        ("age,sex,y\n,f,ill\n60,f,ill\n", "column 'age' now has missing cells"),
        ("age,sex,y\nold,f,ill\n", "'age' is numbers at the agreed schema and text at this site"),
        ("age,y\n50,ill\n", "'sex' is at the agreed schema and not at this site's data"),
        ("age,sex,y\n50,f,dead\n", "it has other classes"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_with(str(path), options, schema)
    path.write_text("age,sex,y\n50,x,ill\n")
    with pytest.warns(CoterieWarning, match="'sex' holds 'x'.*taken as unknown"):
        assert read_with(str(path), options, schema).x.tolist() == [[50, 0, 0]]
    path.write_text("sex,age,y\nm,7,well\n")
    found = read_with(str(path), options, schema)
    assert (found.x.tolist(), found.y.tolist(), found.classes) == ([[7, 0, 1]], [1], 2)
    with pytest.raises(ConfigError, match="has no images"):
        read_with(str(path), options, schema, "unit")


def hostile(**fields):
    return json.dumps({**json.loads(TABLE.to_json()), **fields})


def columns_of(count, levels=0):
    kind = "levels" if levels else "numbers"
    names = sorted(f"l{i}" for i in range(levels))
    return [
        {"name": f"c{i}", "kind": kind, "missing": False, "levels": names} for i in range(count)
    ]


HOSTILE = {
    "no json": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a huge integer": '{"kind":' + "9" * 10_000 + "}",
    "nothing": "{}",
    "unknown field": hostile(code="os:system"),
    "unknown kind": hostile(kind="pickle"),
    "number for text": hostile(target={"name": 3, "kind": "texts", "classes": ["a", "b"]}),
    "text for number": hostile(kind="images", columns=[], shape=["1", 2, 3]),
    "fraction": hostile(kind="features", columns=[], shape=[1.5]),
    "negative side": hostile(kind="features", columns=[], shape=[-1]),
    "two negative sides": hostile(kind="features", columns=[], shape=[-1, -1]),
    "huge shape": hostile(kind="images", columns=[], shape=[3, 100_000, 100_000]),
    "high rank": hostile(kind="features", columns=[], shape=[1] * 9),
    "wrong rank": hostile(kind="images", columns=[], shape=[8]),
    "table with a shape": hostile(shape=[2]),
    "no columns": hostile(columns=[]),
    "a column twice": hostile(columns=columns_of(1) * 2),
    "too many columns": hostile(columns=columns_of(10_001)),
    "too many levels": hostile(columns=columns_of(1, 101)),
    "too many features": hostile(columns=columns_of(1_001, 100)),
    "levels of numbers": hostile(columns=[{**columns_of(1)[0], "levels": ["a"]}]),
    "levels out of order": hostile(columns=[{**columns_of(1, 2)[0], "levels": ["b", "a"]}]),
    "a level twice": hostile(columns=[{**columns_of(1, 2)[0], "levels": ["a", "a"]}]),
    "a long name": hostile(columns=[{**columns_of(1)[0], "name": "x" * 1_001}]),
    "a NUL": hostile(columns=[{**columns_of(1)[0], "name": "x\x00"}]),
    "half a character": TABLE.to_json().replace("age", "\\ud800"),
    "too many classes": hostile(
        target={"name": "y", "kind": "texts", "classes": sorted(map(str, range(100_001)))}
    ),
    "quantity of classes": hostile(target={"name": "y", "kind": "quantity", "classes": ["a"]}),
    "no classes": hostile(target={"name": "y", "kind": "texts", "classes": []}),
    "unknown part": hostile(parts=[0, 7]),
    "parts twice": hostile(parts=[0, 0]),
    "unknown pixels": hostile(kind="images", columns=[], shape=[1, 2, 2], pixels="/etc/passwd"),
    "tokens without number": hostile(kind="tokens", columns=[], shape=[7]),
    "too many tokens": hostile(kind="tokens", columns=[], shape=[7], tokens=10**7),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_schema_is_refused_in_one_short_line(case):
    with pytest.raises(DataError, match="schema") as caught:
        Schema.from_json(HOSTILE[case])
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_a_text_that_is_too_long_is_not_parsed(monkeypatch):
    monkeypatch.setattr("coterie.storage.files.MOST_BYTES", 10)
    with pytest.raises(DataError, match="expected at most 10"):
        Schema.from_json(TABLE.to_json())


@pytest.mark.parametrize(
    "text",
    [
        '{"mean": [1.0], "std": [1.0, 2.0]}',
        '{"mean": [NaN], "std": [1.0]}',
        '{"mean": [1e999], "std": [1.0]}',
        '{"mean": [1.0], "std": [0.0]}',
        '{"mean": [1.0], "std": [1.0], "target_std": -1.0}',
        '{"mean": ["1"], "std": [1.0]}',
        '{"mean": [1.0], "std": [1.0], "seed": 1}',
    ],
)
def test_hostile_moments_are_refused(text):
    with pytest.raises(DataError, match="moments"):
        Moments.from_json(text)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=4), st.floats(1e-300, 1e300))
def test_moments_are_the_same_bits_after_json(mean, std):
    moments = Moments(tuple(mean), (std,) * len(mean), mean[0], std)
    assert repr(Moments.from_json(moments.to_json())) == repr(moments)


def test_means_that_cannot_be_are_refused():
    data = TABLE.example()
    for means in (np.zeros(1), np.array([0.0, np.nan, 0.0])):
        with pytest.raises(DataError, match="found means"):
            site_squares(data, torch.arange(1), means)
    with pytest.raises(DataError, match="found 1 means for 3 inputs"):
        apply(data, Moments((0.0,), (1.0,)))


def test_texts_need_the_same_characters_at_every_site(tmp_path):
    held = {"a": "abba cab", "b": "a cab bcca", "c": "a cab d"}
    for site, text in held.items():
        (tmp_path / site).mkdir()
        (tmp_path / site / f"{site}.txt").write_text(text * 9)
        if site != "c":
            (tmp_path / f"{site}.txt").write_text(text * 9)
    options = {"length": 3, "stride": 2}
    pooled = federate(load(str(tmp_path), **options), NATURAL, **SHARES)
    refuse_differences(pooled, *agreed({site: tmp_path / site for site in "ab"}, options))
    with pytest.raises(DataError, match=r"classes at a are not those .* tokens have no names"):
        agreed({site: tmp_path / site for site in "ac"}, options)


@pytest.mark.parametrize("name", ["digits", "sine"])
def test_a_dataset_of_the_registry_has_a_schema_too(name):
    whole = load(name)
    schema = site_source(name, {}).schema
    found = read_with(name, {}, schema)
    for field in ("x", "y", "scale", "shift"):
        one, other = getattr(whole, field), getattr(found, field)
        assert (one is None and other is None) or same_bits(one, other)
    assert registry.factory("auto", schema.example())()(schema.example().x.float()).shape[0] == 1
