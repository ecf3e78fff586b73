"""VGG-11 with batch norm for 32x32 images, as P1's embedding network (reading P1-11).

The embedding is the linear output of the second dense layer, projected onto its first 256 principal
components over all samples, training and test together. The recipe is ours: P1 fine-tunes a network
pretrained on ImageNet until it classifies 85 % of CIFAR-10's test images correctly.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batches import crop_flip
from ..arrays import Array, normalisation
from ..federation import Dataset

RECIPE = "vgg11"
SIDE, WIDTH, COMPONENTS = 32, 4096, 256
CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0 is a max pool
EPOCHS, FEWEST_STEPS = 20, 300
BATCH, BLOCK, RATE = 256, 1000, 0.05


class VGG11(nn.Module):
    """Eight 3x3 convolutions with batch norm, two dense layers with dropout, an output layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in CHANNELS:
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.first = nn.Linear(channels, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, classes)

    def embedded(self, x: Tensor) -> Tensor:
        """The second dense layer, before its ReLU."""
        hidden: Tensor = self.second(
            F.dropout(F.relu(self.first(self.body(x))), 0.5, self.training)
        )
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of the classes from the second dense layer."""
        found: Tensor = self.out(F.dropout(F.relu(hidden), 0.5, self.training))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.scores(self.embedded(x))


class _Images:
    """All images and labels on a device; batches are standardised and 32 pixels wide."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.x, self.y = dataset.x.to(device), dataset.y.to(device)
        scale, shift = normalisation(dataset.name, dataset.x, "standard")
        if scale is None or shift is None:
            raise AssertionError("embed() admits images only")
        self.scale, self.shift = scale.to(device), shift.to(device)

    def batch(self, rows: Tensor, luck: Tensor | None = None) -> Tensor:
        """Model inputs; ``luck [B, 3]``, if given, crops and mirrors colour images."""
        x = self.x[rows]
        if luck is not None and x.shape[1] == 3:
            x = crop_flip(x, luck)
        x = x.float() * self.scale + self.shift
        if x.shape[2:] != (SIDE, SIDE):
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", antialias=True)
        return x.contiguous(memory_format=torch.channels_last)


def train(dataset: Dataset, rows: Tensor, device: torch.device) -> tuple[Array, Array]:
    """Train the network on these samples; embed all samples, and say which it classifies right."""
    images = _Images(dataset, device)
    network = VGG11(dataset.x.shape[1], dataset.classes)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    with _repeatable():
        _fit(network, images, rows.to(device))
        hidden, right = _apply(network.eval(), images)
        return _principal(hidden).cpu().numpy(), right.cpu().numpy()


def _fit(network: VGG11, images: _Images, rows: Tensor) -> None:
    """SGD with momentum, one cycle of the rate; in bfloat16 on a GPU."""
    device = rows.device
    optimizer = torch.optim.SGD(
        network.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    epochs = max(EPOCHS, -(-FEWEST_STEPS * BATCH // len(rows)))
    steps = epochs * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    for _ in range(epochs):
        # Drawn on the CPU, so that the same samples are in a batch on every device.
        order, luck = torch.randperm(len(rows)).to(device), torch.rand(len(rows), 3).to(device)
        for batch, drawn in zip(rows[order].split(BATCH), luck.split(BATCH), strict=True):
            if len(batch) == 1:  # batch norm needs two samples
                continue
            x = images.batch(batch, drawn)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(network(x), images.y[batch])
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def _apply(network: VGG11, images: _Images) -> tuple[Tensor, Tensor]:
    """The second dense layer of all samples, and which samples are classified correctly."""
    samples = len(images.y)
    hidden = torch.empty(samples, WIDTH, device=images.y.device)
    right = torch.empty(samples, dtype=torch.bool, device=images.y.device)
    for rows in torch.arange(samples, device=images.y.device).split(BLOCK):
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


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let cuDNN choose algorithms that give the same result every time; restore its settings."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
