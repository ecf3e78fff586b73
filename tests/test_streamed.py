"""Samples that are read in batches, or stay in mapped files, give the run of samples in memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import coterie
from coterie.data import Streamed
from coterie.data.federation import BLOCK
from coterie.errors import ConfigError, DataError

SMALL = {"rounds": 2, "method": "fedavg", "model": "linear", "engine": "loop"}


def sites(rows=2400):
    """Two sites of images; a site has more samples than are ever read at once."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, size=(2, rows, 1, 3, 3), dtype=np.uint8)
    return {f"s{k}": (x[k], (x[k, :, 0, 1, 1] > 127).astype(np.int64)) for k in range(2)}


def streams(pairs):
    return {
        name: Streamed(TensorDataset(*map(torch.from_numpy, pair))) for name, pair in pairs.items()
    }


def facts(run):
    return run.summary["digest"], run.roster.fingerprint


def test_streamed_samples_give_the_same_run_and_are_never_all_read(monkeypatch):
    expected, read, plain = facts(coterie.run(data=sites(), **SMALL)), [], Streamed.__getitem__

    def counted(self, index):
        found = plain(self, index)
        read.append(found.numel() // self.shape[1:].numel())
        return found

    monkeypatch.setattr(Streamed, "__getitem__", counted)
    automatic = {**SMALL, "engine": "auto"}
    assert facts(coterie.run(data=streams(sites()), **automatic)) == expected
    assert 0 < max(read) <= BLOCK < 2400 * 0.64


def test_a_mapped_folder_is_read_as_the_file_of_the_same_arrays(tmp_path):
    pairs = list(sites(40).values())
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    arrays = {"x": x, "y": y, "client": np.repeat([0, 1], 40)}
    np.savez(tmp_path / "all.npz", **arrays)
    (tmp_path / "all").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "all" / f"{name}.npy", array)
    data = coterie.data.load(str(tmp_path / "all"))
    data.x[0] = 7  # a change stays in this process
    assert np.array_equal(np.load(tmp_path / "all" / "x.npy"), x)
    found = [facts(coterie.run(data=str(tmp_path / f), **SMALL)) for f in ("all", "all.npz")]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"engine": "vmap"}, "engine.name = 'vmap' needs all samples"),
        ({"partition": "latent", "clients": 6}, "latent needs all samples"),
    ],
)
def test_what_needs_all_samples_says_so_before_training(asked, error):
    data = streams(sites(30))
    if "partition" in asked:
        data = data["s0"]
    with pytest.raises(ConfigError, match=error):
        coterie.run(data=data, **{**SMALL, **asked})


def test_streams_beside_arrays_are_refused():
    data = {"s0": streams(sites(30))["s0"], "s1": sites(30)["s1"]}
    with pytest.raises(DataError, match="stream those of all sites"):
        coterie.run(data=data, **SMALL)
