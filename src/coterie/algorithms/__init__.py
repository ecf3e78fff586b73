"""Every method by the name a configuration uses."""

from ..core.algorithm import AnyAlgorithm
from .apfl import APFL
from .cfl import CFL
from .cfl_mean import CFLMean
from .circle import Circle
from .cobo import CoBo
from .ditto import Ditto
from .erosion import Erosion
from .fedala import FedALA
from .fedamp import FedAMP
from .fedavg import FedAvg
from .fedavg_data import FedAvgData
from .fedbabu import FedBABU
from .fedcollab import FedCollab
from .feddbe import FedDBE
from .fedem import FedEM
from .federico import FedeRiCo
from .fedfomo import FedFomo
from .fedfomo_ma import FedFomoMA
from .fedpac import FedPAC
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrod import FedRoD
from .heurfedamp import HeurFedAMP
from .ifca import IFCA
from .lgfedavg import LGFedAvg
from .local import Local
from .mocha import Mocha
from .pafl import PaFL
from .pafl_ewc import PaFLEWC
from .pafl_kd import PaFLKD, PaFLKDBounded
from .perfedavg import PerFedAvg
from .pfedgraph import PFedGraph
from .pfedme import PFedMe
from .qfedavg import QFedAvg
from .scaffold import Scaffold
from .term import TERM
from .waffle import Waffle
from .waffle_stable import WaffleStable

ALGORITHMS: dict[str, type[AnyAlgorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg_data": FedAvgData,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "waffle": Waffle,
    "waffle_stable": WaffleStable,
    "erosion": Erosion,
    "apfl": APFL,
    "fedala": FedALA,
    "qfedavg": QFedAvg,
    "term": TERM,
    "pafl": PaFL,
    "pafl_kd": PaFLKD,
    "pafl_kd_bounded": PaFLKDBounded,
    "pafl_ewc": PaFLEWC,
    "fedfomo": FedFomo,
    "fedfomo_ma": FedFomoMA,
    "federico": FedeRiCo,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "pfedgraph": PFedGraph,
    "cobo": CoBo,
    "lgfedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedpac": FedPAC,
    "feddbe": FedDBE,
    "fedrod": FedRoD,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "perfedavg": PerFedAvg,
    "fedem": FedEM,
    "mocha": Mocha,
    "circle": Circle,
    "cfl": CFL,
    "cfl_mean": CFLMean,
    "fedcollab": FedCollab,
    "ifca": IFCA,
}

# A method followed by an adaptation has a name of its own in the papers.
ALIASES: dict[str, tuple[str, str]] = {
    "fedavg_ft": ("fedavg", "ft"),
    "fedprox_ft": ("fedprox", "ft"),
}
