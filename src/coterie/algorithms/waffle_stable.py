"""WAFFLE with corrections that cannot feed on themselves, and without a bias at the end: ours.

As WAFFLE, but:

    d_i = ‖c_i⁺ − c_{i*}⁺‖                         agents are told apart by their mean gradients
    c   ← Σ ᾱ_i c_i⁺                               instead of c + Σ ᾱ_i Δc_i
    an agent with ᾱ_i = 0 is sent its own c_i in place of c, so that its correction is 0

Travels: as WAFFLE.

Notes:
    The updates that WAFFLE compares contain the correction c − c_i, which hides part of the
    difference between agents. The increments of c leave a constant bias c − c_{i*} in Alice's last,
    local rounds. And an agent of weight 0 that is corrected by c − c_i is pulled to x by nothing:
    its control grows until it overflows (readings P4-1 to P4-3).
    One outlier increases dM, gets weight 0 itself and gives weight to agents of the wrong concept;
    ``screen`` leaves it out. It tests Δy_i and the vectors that are compared.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Round
from ..core.mixing import mix
from ..core.ranges import NotNegative
from .erosion import lengths
from .scaffold import Shared
from .waffle import Copies, Waffle


@dataclass(frozen=True)
class WaffleStable(Waffle):
    """WAFFLE whose controls stay bounded and end without a bias.

    Fields, beside those of WAFFLE:
        distance: vectors compared: the agents' mean ``gradient`` c_i⁺ or their ``update`` Δy_i.
        screen: leave out agents whose update is longer than this many times the median; 0 leaves
            out none, 3 is safe.
    """

    distance: Literal["update", "gradient"] = "gradient"
    screen: NotNegative = 0.0

    title: ClassVar[str] = "WAFFLE, stable"

    def download(self, server: Copies, round: Round) -> Shared:
        """Every requester's model and control; an agent of weight 0 gets its own control."""
        counts = (server.weights[:, round.clients].T > 0)[..., None]  # [m, R, 1]
        x, c = super().download(server, round)
        return Shared(x, torch.where(counts, c, server.controls[round.clients]))

    def _control(self, c: Tensor, shares: Tensor, dc: Tensor, control: Tensor) -> Tensor:
        """The mean of the agents' controls after the round."""
        return mix(shares, control)

    def _counts(self, vectors: Tensor, at: int) -> Tensor:
        """Which agents' vectors are short enough to be compared; the requester's always is."""
        if not self.screen:
            return super()._counts(vectors, at)
        norm = lengths(vectors)
        fine = norm <= self.screen * norm.median()
        return fine.index_fill(0, torch.tensor(at, device=fine.device), True)
