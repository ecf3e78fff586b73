"""The small embedding network: convolutions with batch norm, then two dense layers of 512."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..arrays import Array, normalisation
from ..federation import Dataset

WIDTH = 512
COLOUR_EPOCHS, GREY_EPOCHS, FEWEST_STEPS = 12, 3, 300
BATCH, RATE = 128, 0.05
RECIPE = f"vgg-small-{WIDTH}"


class SmallNetwork(nn.Module):
    """3x3 convolutions with batch norm and pooling, two dense layers, an output layer."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (64, 128, 256) if channels == 3 else (32, 64, 128):
            for start in (channels, width):
                layers += [nn.Conv2d(start, width, 3, padding=1, bias=False)]
                layers += [nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
            if side >= 4:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(min(side, 4)), nn.Flatten())
        self.first = nn.Linear(channels * min(side, 4) ** 2, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, classes)

    def embedded(self, x: Tensor) -> Tensor:
        """The second dense layer, before its ReLU."""
        hidden: Tensor = self.second(F.relu(self.first(self.body(x))))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.out(F.relu(self.embedded(x)))
        return scores


def train(dataset: Dataset, rows: Tensor, device: torch.device) -> tuple[Array, Array]:
    """Train the network on these samples; embed all samples, and say which it classifies right."""
    network = SmallNetwork(dataset.x.shape[1], min(dataset.x.shape[2:]), dataset.classes).to(device)
    _fit(network, dataset, rows, device)
    return _apply(network.eval(), dataset, device)


def _fit(network: SmallNetwork, dataset: Dataset, rows: Tensor, device: torch.device) -> None:
    optimizer = torch.optim.SGD(
        network.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    epochs = _epochs(dataset, len(rows))
    steps = epochs * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows))].split(BATCH):
            if len(batch) == 1:  # batch norm needs two samples
                continue
            x = _augmented(_inputs(dataset, batch, device))
            optimizer.zero_grad()
            F.cross_entropy(network(x), dataset.y[batch].to(device)).backward()
            optimizer.step()
            schedule.step()


def _epochs(dataset: Dataset, samples: int) -> int:
    """The number of epochs: more for colour images, which are harder, and for few samples."""
    usual = COLOUR_EPOCHS if dataset.x.shape[1] == 3 else GREY_EPOCHS
    return max(usual, -(-FEWEST_STEPS * BATCH // samples))


def _inputs(dataset: Dataset, rows: Tensor, device: torch.device) -> Tensor:
    """Standardised pixels; the clients' pixel scale must not change the partition."""
    x = dataset.x[rows]
    scale, shift = normalisation(dataset.name, x, "standard")
    if scale is None or shift is None:
        return x.to(device).float() / 255
    return x.to(device).float() * scale.to(device) + shift.to(device)


def _augmented(x: Tensor) -> Tensor:
    """Shift the colour images of a batch by the same few pixels; mirror each image at random."""
    if x.shape[1] != 3:
        return x
    dy, dx = torch.randint(0, 9, (2,)).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, dy : dy + x.shape[2], dx : dx + x.shape[3]]
    mirrored = torch.rand(len(x), device=x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


@torch.no_grad()
def _apply(network: SmallNetwork, dataset: Dataset, device: torch.device) -> tuple[Array, Array]:
    """The embeddings of all samples, and which samples are classified correctly."""
    points, right = [], []
    for rows in torch.arange(len(dataset.y)).split(512):
        hidden = network.embedded(_inputs(dataset, rows, device))
        points.append(hidden.cpu())
        guess = network.out(F.relu(hidden)).argmax(-1).cpu()
        right.append(guess == dataset.y[rows])
    return torch.cat(points).numpy(), torch.cat(right).numpy()
