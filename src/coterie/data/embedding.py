"""Embeds images by a network that is trained here on the dataset; the embedding is cached.

P1 used an ImageNet-pretrained VGG-11, which is not available without a download. The networks here
are trained from scratch: ``vgg11``, and a smaller one of the same structure (convolutions, then two
dense layers, of which the second is the embedding). A network's accuracy on the test part is part
of the embedding's name.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from . import dataset_cache, small_network, vgg11
from .arrays import TEST, Array
from .federation import Dataset

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
