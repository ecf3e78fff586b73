"""Every method by the name a configuration uses."""

from ..algorithm import AnyAlgorithm
from .fedamp import FedAMP
from .fedavg import FedAvg
from .fedfomo import FedFomo
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .heurfedamp import HeurFedAMP
from .lgfedavg import LGFedAvg
from .local import Local
from .qfedavg import QFedAvg
from .scaffold import Scaffold
from .term import TERM

ALGORITHMS: dict[str, type[AnyAlgorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "qfedavg": QFedAvg,
    "term": TERM,
    "fedfomo": FedFomo,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "lgfedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
}

# A method followed by an adaptation has a name of its own in the papers.
ALIASES: dict[str, tuple[str, str]] = {
    "fedavg_ft": ("fedavg", "ft"),
    "fedprox_ft": ("fedprox", "ft"),
}
