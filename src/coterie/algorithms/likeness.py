"""Whether the distance between two models is what the sampling of their data explains.

Two models trained from the same point on two samples of the same distribution differ, because the
samples differ. A client measures this difference on its own data: in every round it trains a second
model w_i' on every second sample only (as many steps, each on half as many samples), and uploads
with w_i the mean v_i of ‖w_i − w_i'‖² over its rounds. v_i estimates how far sampling alone moves
w_i from the model of unlimited data, as w_i is about the mean of w_i' and the other half's model.

    z_ij = ‖w_i − w_j‖² / (v_i + v_j)        1 where i and j hold samples of the same data
    alike_ij = 1 for z ≤ 1,  2 − z for 1 < z < 2,  0 for z ≥ 2

z − 1 is the squared difference between the ideal models of i and j, relative to their sampling
noise. As long as z < 2, the mean of the two models is nearer to each client's ideal model than the
client's own model is. From z = 2 on the other client counts as a stranger and gets weight zero.
"""

import torch
from torch import Tensor

STRANGER = 2.0  # from this z on the mean of two models is worse than either model
TINY = 1e-300  # the reciprocal of a smaller number may overflow


def unlikeness(distances: Tensor, noise: Tensor, others: Tensor) -> Tensor:
    """z from squared distances ``[m, n]`` and the noise v of the rows and of the columns.

    >>> unlikeness(torch.tensor([[6.0, 0.0]]), torch.tensor([1.0]), torch.tensor([2.0, 0.0]))
    tensor([[2., 0.]])
    """
    expected = noise[:, None] + others
    return torch.where(distances > 0, distances / expected.clamp(min=TINY), 0.0)


def likeness(z: Tensor) -> Tensor:
    """1 where noise explains the whole distance, 0 where it explains at most half of it.

    >>> likeness(torch.tensor([0.3, 1.0, 1.5, 2.0, 7.0]))
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    return (STRANGER - z).clamp(0, 1)
