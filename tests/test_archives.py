"""npz files of other people: lies, bombs and pickles end in one message, and take no memory."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from coterie.data import load
from coterie.errors import DataError
from coterie.storage.archives import read_npz


def header(shape: object, descr: str = "<f4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(f"{name}.npy", content)
    return path


def test_honest_arrays_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "x": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "t": np.array(["a", "ä"]),
        "s": np.array(3),
        "e": np.zeros((0, 4)),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = read_npz(tmp_path / "a.npz")
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)


@pytest.mark.parametrize("shape", [(10**12, 4), (2**62,), (40, 10**9), (-5, 4), (3,)])
def test_a_header_that_lies_is_refused_before_memory_is_taken(tmp_path, shape):
    path = archive(tmp_path / "a.npz", x=header(shape) + b"\0" * 64)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="says that it has the shape"):
            read_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.storage.archives._MEMORY_SHARE", 1e-4)
    zeros = np.zeros(10**7, np.uint8)
    path = archive(tmp_path / "a.npz", x=header((10**7,), "|u1") + zeros.tobytes())
    assert path.stat().st_size < 10**5
    with pytest.raises(ValueError, match="memory allows"):
        read_npz(path)


def test_pickles_and_damage_are_refused(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for content in (stream.getvalue(), b"", b"\x93NUMPY\x09\x09", header((1,), "<q9")):
        with pytest.raises(ValueError, match=r"."):
            read_npz(archive(tmp_path / "a.npz", x=content))
    (tmp_path / "b.npz").write_bytes(b"PK\x05\x06 no zip")
    with pytest.raises(ValueError, match=r"."):
        read_npz(tmp_path / "b.npz")


X, Y = np.arange(80.0).reshape(20, 4), np.arange(20) % 3


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"client": np.arange(20) - 1}, "numbers from -1"),
        ({"client": np.arange(7)}, r"shape \[7\]"),
        ({"client": np.array(["a"] * 20)}, "found <U1"),
        ({"client": np.full(20, np.nan)}, "found float64"),
        ({"client": np.full(20, 10**15)}, "number the clients from 0"),
        ({"y": Y * 10**15}, "numbered from 0"),
        ({"y": Y * 1j}, "targets are complex"),
        ({"x": X * 1e300}, "not finite, or too large"),
        ({"x": np.where(X == 7, np.inf, X)}, "sample 1 holds"),
        ({"x": X.astype(str)}, "expected numbers"),
        ({"x": np.where(X == 7, np.nan, X).reshape(20, 2, 2)}, "sample 1 holds"),
    ],
)
def test_arrays_that_cannot_be_meant_are_refused(tmp_path, arrays, said):
    np.savez(tmp_path / "a.npz", **{"x": X, "y": Y, **arrays})
    with pytest.raises(DataError, match=said):
        load(str(tmp_path / "a.npz"))


def test_a_missing_number_in_a_row_of_features_stays_missing(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.where(X == 7, np.nan, X), y=Y)
    assert load(str(tmp_path / "a.npz")).x.isnan().sum() == 1
