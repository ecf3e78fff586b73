"""Whether another client's model would bring a client nearer to the model of unlimited data.

Two models trained from the same point on two samples of the same distribution differ, because the
samples differ. A client measures this difference on its own data: in every round it trains a second
model w_i' on every second sample only (as many steps, each on half as many samples), and uploads
with w_i the mean v_i of ‖w_i − w_i'‖² over its rounds. v_i estimates how far sampling alone moves
w_i from the model of unlimited data, as w_i is about the mean of w_i' and the other half's model.

    z_ij = ‖w_i − w_j‖² / 2v_i        1 where i and j hold equally large samples of the same data
    alike_ij = 1 for z ≤ 1,  2 − z for 1 < z < 2,  0 for z ≥ 2

On average ‖w_i − w_j‖² is v_i + v_j plus the squared difference of the two ideal models. The mean
of w_i and w_j is a quarter of that away from the ideal model of i, and w_i itself is v_i away. So
the mean is nearer exactly as long as z < 2. From z = 2 on j counts as a stranger to i, and gets
weight zero. Each client judges by its own noise: a client that is sure of its model may be alike to
one that is unsure, and regard it as a stranger.
"""

import torch
from torch import Tensor

STRANGER = 2.0  # from this z on the mean of two models is worse than the client's own
TINY = 1e-300  # the reciprocal of a smaller number may overflow


def unlikeness(distances: Tensor, noise: Tensor) -> Tensor:
    """z from squared distances ``[m, n]`` and the noise v of the clients of the rows.

    >>> unlikeness(torch.tensor([[6.0, 0.0], [6.0, 2.0]]), torch.tensor([1.0, 3.0]))
    tensor([[3.0000, 0.0000],
            [1.0000, 0.3333]])
    """
    return torch.where(distances > 0, distances / (2 * noise[:, None]).clamp(min=TINY), 0.0)


def likeness(z: Tensor) -> Tensor:
    """1 where noise explains the whole distance, 0 where it explains at most half of it.

    >>> likeness(torch.tensor([0.3, 1.0, 1.5, 2.0, 7.0]))
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    return (STRANGER - z).clamp(0, 1)
