"""Latent distributions (reading P1-11): clusters of images in a trained network's embedding."""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core import random
from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ...storage.archives import read_npz
from ...storage.files import expanded
from .. import dataset_cache
from ..arrays import TEST, Array
from ..assign import Ints, Plan, class_cells, client_names
from ..federation import Dataset
from . import small_network, vgg11
from .base import Partition, one_client_each
from .groups import even_within

# ---- embeds images by a network that is trained here on the dataset; the embedding is cached ----

# P1 used an ImageNet-pretrained VGG-11, which is not available without a download. The networks
# here are trained from scratch: ``vgg11``, and a smaller one of the same structure (convolutions,
# then two dense layers, of which the second is the embedding). A network's accuracy on the test
# part is part of the embedding's name.

SMALL = "small"


class EmbeddingNetwork(NamedTuple):
    """How a network is trained, and by which name its embeddings are known and cached."""

    recipe: str
    version: str  # increase it with every change to the module that affects the result
    # (dataset, training samples, device) -> points [N, d], and which samples are classified right
    train: Callable[[Dataset, Tensor, torch.device], tuple[Array, Array]]


NETWORKS: dict[str, EmbeddingNetwork] = {
    SMALL: EmbeddingNetwork(small_network.RECIPE, "3", small_network.train),
    "vgg11": EmbeddingNetwork(vgg11.RECIPE, "1", vgg11.train),
}


def embed(dataset: Dataset, network: str = SMALL) -> tuple[Array, str]:
    """The embedding of every sample, one row each, and its name.

    Rows of features are their own embedding unless a network is named.
    """
    if network == SMALL and dataset.x.ndim == 2 and dataset.x.is_floating_point():
        return dataset.x.nan_to_num(0.0).numpy(), "the features themselves"
    if dataset.x.dtype != torch.uint8 or dataset.regression:
        raise DataError(
            f"{dataset.name}: only images with classes can be embedded here; give an embedding of "
            "your own with partition.embedding = 'file.npy'"
        )
    recipe, version, _ = NETWORKS[network]
    name = dataset_cache.key(recipe, version, dataset.x.numpy(), dataset.y.numpy())
    made = dataset_cache.remember(f"embedding-{name}", lambda: train(dataset, network))
    part = "training" if dataset.fixed is None else "test"
    return made["embedding"], f"{recipe}, {part} accuracy {100 * float(made['accuracy']):.1f} %"


def train(dataset: Dataset, network: str) -> dataset_cache.Arrays:
    """Train a network on the training part, on a GPU if there is one, and embed all samples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_test = torch.zeros(len(dataset.y), dtype=torch.bool)
    if dataset.fixed is not None:
        is_test = dataset.fixed == TEST
    with torch.random.fork_rng():
        torch.manual_seed(0)
        points, right = NETWORKS[network].train(dataset, (~is_test).nonzero()[:, 0], device)
    judged = right[is_test.numpy()] if bool(is_test.any()) else right
    return {"embedding": points, "accuracy": np.array(judged.mean())}


@dataclass(frozen=True)
class Latent(Partition):
    """Each client gets samples of one cluster, found by PCA and k-means on an embedding."""

    clients: Count = 15  # the number of clients
    distributions: Count = 5  # the number of clusters, each divided among some of the clients
    embedding: str | None = None  # "vgg11", or a .npy or .npz file; None: a small network's
    components: Count = 256  # principal components of the embedding that are clustered

    def check_together(self) -> None:
        """Every distribution needs a client; VGG-11's embedding has 256 components."""
        one_client_each(self.clients, self.distributions, "distributions")
        if self.embedding == vgg11.RECIPE and self.components > vgg11.COMPONENTS:
            raise ConfigError(
                f"partition.components: found {self.components}, but the embedding 'vgg11' keeps "
                f"{vgg11.COMPONENTS}; expected at most that"
            )

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Divide each cluster's samples equally among its clients."""
        clusters, note = self._clusters(dataset, seed)
        groups = consecutive(self.clients, self.distributions)
        return Plan(
            client_names(self.clients),
            clusters,
            tuple(f"distribution {d}" for d in range(self.distributions)),
            lambda supply, test: even_within(groups, supply),
            groups,
            note=note,
        )

    def _clusters(self, dataset: Dataset, seed: int) -> tuple[Ints, str]:
        network = self.embedding or SMALL
        if network in NETWORKS and self.distributions == dataset.classes:
            labels, _ = class_cells(dataset, "latent")
            return labels, "the distributions are the classes"
        if network in NETWORKS:
            points, note = embed(dataset, network)
        else:
            points, note = read_embedding(Path(network), len(dataset.y))
        return cluster(points, self.distributions, self.components, seed), f"embedding: {note}"


def consecutive(clients: int, groups: int) -> Ints:
    """The groups of clients in equal consecutive blocks; the remaining clients one per group."""
    blocks = np.repeat(np.arange(groups), clients // groups)
    return np.concatenate([blocks, np.arange(clients - len(blocks))])


def read_embedding(path: Path, samples: int) -> tuple[Array, str]:
    """Read a user's own embedding: one row per sample, in the order of the dataset."""
    try:
        place = expanded(path)
        if zipfile.is_zipfile(place):
            points = next(iter(read_npz(place).values()))
        else:
            points = np.load(place, allow_pickle=False)
        if points.dtype.kind not in "fiu":
            raise ValueError(f"it holds {points.dtype}")
    except (OSError, ValueError, EOFError, StopIteration, MemoryError) as error:
        raise DataError(f"{path}: not an embedding that can be read ({error})") from error
    if points.ndim != 2 or len(points) != samples or not np.isfinite(points).all():
        raise DataError(
            f"{path}: found shape {points.shape}, expected {samples} rows (one per sample: "
            "training, then test) of finite numbers"
        )
    return points, path.name


def cluster(points: Array, clusters: int, components: int, seed: int) -> Ints:
    """Cluster points by PCA, then k-means (k-means++ start, 5 restarts, at most 100 iterations)."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    state = random.derive(seed, "latent") % 2**32
    kept = min(components, *points.shape)
    reduced = PCA(kept, random_state=state).fit_transform(points.astype(np.float64))
    means = KMeans(clusters, n_init=5, max_iter=100, random_state=state)
    return np.asarray(means.fit_predict(reduced), np.int64)
