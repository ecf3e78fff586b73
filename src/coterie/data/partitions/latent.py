"""Latent distributions (reading P1-11): clusters of images in a trained network's embedding.

P1 used a VGG-11 pretrained on ImageNet, fine-tuned until it classifies 85 % of CIFAR-10's test
images correctly; it is not available without a download. The networks here are trained from scratch
on the dataset: VGG-11, and a smaller one of the same structure. Both are convolutions with batch
norm, then two dense layers, of which the linear output of the second is the embedding (for VGG-11,
projected onto its first 256 principal components over all samples, training and test together). The
embedding is cached; the network's accuracy on the test part is part of its name.
"""

import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core import random
from ...core.batches import crop_flip
from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ...storage import cache
from ...storage.archives import read_npz
from ...storage.files import expanded
from ..arrays import TEST, Array, Ints, normalisation
from ..federation import Dataset
from ..streamed import refuse_streamed
from .base import Partition, Quota, class_cells, client_names, one_client_each
from .labels import even_within

SMALL, VGG11 = "small", "vgg11"
RATE, FEWEST_STEPS = 0.05, 300
SMALL_WIDTH, SMALL_BATCH = 512, 128
COLOUR_EPOCHS, GREY_EPOCHS = 12, 3
SIDE, WIDTH, COMPONENTS, BLOCK = 32, 4096, 256, 1000  # of VGG-11, as are the next two lines
CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0 is a max pool
EPOCHS, BATCH = 20, 256


class _Network(nn.Module):
    """Convolutions, then two dense layers and an output layer, each after ReLU and dropout."""

    def __init__(
        self, body: list[nn.Module], inputs: int, width: int, classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(*body, nn.Flatten())
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.out, self.dropout = nn.Linear(width, classes), dropout

    def embedded(self, x: Tensor) -> Tensor:
        """The second dense layer, before its ReLU."""
        hidden: Tensor = self.second(self._active(self.first(self.body(x))))
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of the classes from the second dense layer."""
        found: Tensor = self.out(self._active(hidden))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.scores(self.embedded(x))

    def _active(self, hidden: Tensor) -> Tensor:
        return F.dropout(F.relu(hidden), self.dropout, self.training)


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def _small(channels: int, side: int, classes: int) -> _Network:
    """Three pairs of convolutions with pooling, two dense layers of 512."""
    body: list[nn.Module] = []
    for width in (64, 128, 256) if channels == 3 else (32, 64, 128):
        body += [*_convolution(channels, width), *_convolution(width, width)]
        channels = width
        if side >= 4:
            body.append(nn.MaxPool2d(2))
            side //= 2
    last = min(side, 4)
    body.append(nn.AdaptiveAvgPool2d(last))
    return _Network(body, channels * last**2, SMALL_WIDTH, classes)


def _vgg11(channels: int, classes: int) -> _Network:
    """VGG-11 with batch norm for 32x32 images: eight convolutions, two dense layers of 4096."""
    body: list[nn.Module] = []
    for width in CHANNELS:
        body += _convolution(channels, width) if width else [nn.MaxPool2d(2)]
        channels = width or channels
    return _Network(body, channels, WIDTH, classes, dropout=0.5)


class Images:
    """All images and labels on a device; the clients' pixel scale does not change the inputs."""

    def __init__(self, dataset: Dataset, device: torch.device, side: int | None = None) -> None:
        self.x, self.y, self.side = dataset.x.to(device), dataset.y.to(device), side
        scale, shift = normalisation(dataset.name, dataset.x, "standard")
        if scale is None or shift is None:
            raise AssertionError("embed() admits images only")
        self.scale, self.shift = scale.to(device), shift.to(device)

    def batch(self, rows: Tensor, luck: Tensor | None = None) -> Tensor:
        """Standardised inputs, ``side`` pixels wide; ``luck [B, 3]`` crops and mirrors colour."""
        x = self.x[rows]
        if luck is not None and x.shape[1] == 3:
            x = crop_flip(x, luck)
        x = x.float() * self.scale + self.shift
        if self.side is None:
            return x
        if x.shape[2:] != (self.side, self.side):
            x = F.interpolate(x, (self.side, self.side), mode="bilinear", antialias=True)
        return x.contiguous(memory_format=torch.channels_last)


def train_small(dataset: Dataset, rows: Tensor, device: torch.device) -> tuple[Array, Array]:
    """Train the small network on these samples; embed all samples, and say which it classifies."""
    images = Images(dataset, device)
    network = _small(dataset.x.shape[1], min(dataset.x.shape[2:]), dataset.classes).to(device)
    usual = COLOUR_EPOCHS if dataset.x.shape[1] == 3 else GREY_EPOCHS  # colour is harder

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in rows[torch.randperm(len(rows))].split(SMALL_BATCH):
            if len(batch) > 1:  # batch norm needs two samples
                yield _shifted(images.batch(batch)), images.y[batch]

    _fit(network, epoch, usual, len(rows), SMALL_BATCH)
    hidden, right = _apply(network.eval(), images, SMALL_WIDTH, 512)
    return hidden.cpu().numpy(), right.cpu().numpy()


def train_vgg11(dataset: Dataset, rows: Tensor, device: torch.device) -> tuple[Array, Array]:
    """As :func:`train_small`, for VGG-11; in bfloat16 on a GPU."""
    images, rows = Images(dataset, device, SIDE), rows.to(device)
    network = _vgg11(dataset.x.shape[1], dataset.classes)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        # Drawn on the CPU, so that the same samples are in a batch on every device.
        order, luck = torch.randperm(len(rows)).to(device), torch.rand(len(rows), 3).to(device)
        for batch, drawn in zip(rows[order].split(BATCH), luck.split(BATCH), strict=True):
            if len(batch) > 1:  # batch norm needs two samples
                yield images.batch(batch, drawn), images.y[batch]

    cudnn = torch.backends.cudnn  # with algorithms that give the same result every time
    with cudnn.flags(cudnn.enabled, deterministic=True, allow_tf32=cudnn.allow_tf32):
        _fit(network, epoch, EPOCHS, len(rows), BATCH, half=device.type == "cuda")
        hidden, right = _apply(network.eval(), images, WIDTH, BLOCK)
        return _principal(hidden).cpu().numpy(), right.cpu().numpy()


def _fit(
    network: _Network,
    epoch: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    usual: int,
    samples: int,
    batch: int,
    half: bool = False,
) -> None:
    """SGD with momentum, one cycle of the rate; more epochs than usual for few samples."""
    optimizer = torch.optim.SGD(
        network.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    epochs = max(usual, -(-FEWEST_STEPS * batch // samples))
    steps = epochs * -(-samples // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    for _ in range(epochs):
        for x, y in epoch():
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()


def _shifted(x: Tensor) -> Tensor:
    """Shift the colour images of a batch by the same few pixels; mirror each image at random."""
    if x.shape[1] != 3:
        return x
    dy, dx = torch.randint(0, 9, (2,)).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, dy : dy + x.shape[2], dx : dx + x.shape[3]]
    mirrored = torch.rand(len(x), device=x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


@torch.no_grad()
def _apply(network: _Network, images: Images, width: int, block: int) -> tuple[Tensor, Tensor]:
    """The second dense layer of all samples, and which samples are classified correctly."""
    device, samples = images.y.device, len(images.y)
    hidden = torch.empty(samples, width, device=device)
    right = torch.empty(samples, dtype=torch.bool, device=device)
    for rows in torch.arange(samples, device=device).split(block):
        hidden[rows] = network.embedded(images.batch(rows))
        right[rows] = network.scores(hidden[rows]).argmax(-1) == images.y[rows]
    return hidden, right


def _principal(points: Tensor) -> Tensor:
    """The points on their first principal components, from the covariance in float64.

    The covariance is summed over blocks: a float64 copy of all points would take 2 GB for CIFAR.
    """
    mean = points.mean(0, dtype=torch.float64)
    covariance = torch.zeros(points.shape[1], points.shape[1], dtype=mean.dtype, device=mean.device)
    for block in points.split(BLOCK):
        apart = block.double() - mean
        covariance += apart.T @ apart
    _, vectors = torch.linalg.eigh(covariance)  # ascending eigenvalues
    main = vectors[:, -min(COMPONENTS, len(points)) :].flip(1)
    return torch.cat([(block.double() - mean) @ main for block in points.split(BLOCK)]).float()


class EmbeddingNetwork(NamedTuple):
    """How a network is trained, and by which name its embeddings are known and cached."""

    recipe: str
    version: str  # increase it with every change to this module that affects the result
    # (dataset, training samples, device) -> points [N, d], and which samples are classified right
    train: Callable[[Dataset, Tensor, torch.device], tuple[Array, Array]]


NETWORKS: dict[str, EmbeddingNetwork] = {
    SMALL: EmbeddingNetwork(f"vgg-small-{SMALL_WIDTH}", "3", train_small),
    VGG11: EmbeddingNetwork(VGG11, "1", train_vgg11),
}


def embed(dataset: Dataset, network: str = SMALL) -> tuple[Array, str]:
    """The embedding of every sample, one row each, and its name.

    Rows of features are their own embedding unless a network is named.
    """
    refuse_streamed(dataset, "the partition latent")
    if network == SMALL and dataset.x.ndim == 2 and dataset.x.is_floating_point():
        return dataset.x.nan_to_num(0.0).numpy(), "the features themselves"
    if dataset.x.dtype != torch.uint8 or dataset.regression:
        raise DataError(
            f"{dataset.name}: only images with classes can be embedded here; give an embedding of "
            "your own with partition.embedding = 'file.npy'"
        )
    recipe, version, _ = NETWORKS[network]
    name = cache.key(recipe, version, dataset.x.numpy(), dataset.y.numpy())
    made = cache.remember(f"embedding-{name}", lambda: train(dataset, network))
    part = "training" if dataset.fixed is None else "test"
    return made["embedding"], f"{recipe}, {part} accuracy {100 * float(made['accuracy']):.1f} %"


def train(dataset: Dataset, network: str) -> cache.Arrays:
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


# ---- the partition ------------------------------------------------------------------------------


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
        if self.embedding == VGG11 and self.components > COMPONENTS:
            raise ConfigError(
                f"partition.components: found {self.components}, but the embedding 'vgg11' keeps "
                f"{COMPONENTS}; expected at most that"
            )

    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """Divide each cluster's samples equally among its clients."""
        clusters, note = self._clusters(dataset, seed)
        groups = consecutive(self.clients, self.distributions)
        return Quota(
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
