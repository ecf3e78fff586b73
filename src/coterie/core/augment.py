"""Augmentation of training images: random crops and horizontal flips."""

import torch
from torch import Tensor

PADDING = 4  # pixels of black around an image before it is cropped


def crop_flip(x: Tensor, luck: Tensor) -> Tensor:
    """Pad images ``[B, C, H, W]`` with black, crop them at random and mirror some of them.

    ``luck [B, 3]`` is uniform on [0, 1) and decides, per image, the vertical offset, the horizontal
    offset and whether the image is mirrored.
    """
    B, C, H, W = x.shape
    offset = (luck[:, :2] * (2 * PADDING + 1)).long() - PADDING
    rows = torch.arange(H, device=x.device) + offset[:, :1]  # [B, H]
    columns = torch.arange(W, device=x.device)
    columns = torch.where(luck[:, 2:] < 0.5, columns.flip(0), columns) + offset[:, 1:2]
    inside = ((rows >= 0) & (rows < H))[:, :, None] & ((columns >= 0) & (columns < W))[:, None, :]
    each, channel = torch.arange(B, device=x.device), torch.arange(C, device=x.device)
    moved = x[
        each[:, None, None, None],
        channel[:, None, None],
        rows.clamp(0, H - 1)[:, None, :, None],
        columns.clamp(0, W - 1)[:, None, None, :],
    ]
    return torch.where(inside[:, None], moved, torch.zeros((), dtype=x.dtype, device=x.device))
