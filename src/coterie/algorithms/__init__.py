"""Every method by the name a configuration uses."""

from ..algorithm import AnyAlgorithm
from .fedamp import FedAMP
from .fedavg import FedAvg
from .fedfomo import FedFomo
from .fedprox import FedProx
from .heurfedamp import HeurFedAMP
from .local import Local
from .scaffold import Scaffold

ALGORITHMS: dict[str, type[AnyAlgorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedfomo": FedFomo,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
}

# A method followed by an adaptation has a name of its own in the papers.
ALIASES: dict[str, tuple[str, str]] = {
    "fedavg_ft": ("fedavg", "ft"),
    "fedprox_ft": ("fedprox", "ft"),
}
