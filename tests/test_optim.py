"""Our optimisers are torch's, as pure functions."""

import pytest
import torch

from coterie.core.optim import adam, sgd
from support import assert_close

SETTINGS = {
    "sgd": (sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        sgd(momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    "adam decay": (
        adam(weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_equal_torchs(name):
    ours, make = SETTINGS[name]
    start = torch.linspace(-1, 2, 6, dtype=torch.float64)
    target = torch.ones(6, dtype=torch.float64)
    theirs = start.clone().requires_grad_()
    optimizer = make([theirs])
    w, state = start, ours.init(start)
    for _ in range(5):
        optimizer.zero_grad()
        ((theirs - target) ** 4).sum().backward()
        optimizer.step()
        w, state = ours.step(w, 4 * (w - target) ** 3, state, 0.1)
    assert_close(w, theirs.detach(), 1e-12)
    assert (w - start).abs().min() > 1e-3
