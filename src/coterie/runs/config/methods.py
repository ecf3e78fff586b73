"""A method as a config names it: an algorithm, its fields, and the adaptation that follows it."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.imports import Code, imported_dataclass
from ...errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ...core.algorithm import AnyAlgorithm

NONE = "none"
VARIANT = "@"  # fedfomo@5 is FedFomo with fields of its own, under its own label
TAG = re.compile(r"[\w.=+,-]{1,80}")  # what may follow it: the label is the name of a folder
OWN = ("train", "adapt")  # tables of a method beside its fields: its own recipe, its adaptation


class Method(NamedTuple):
    """One method of a config: its class, its fields, and its adaptation if it has one."""

    name: str  # in the config
    label: str  # in tables of results and names of folders
    algorithm: type[Any]
    fields: dict[str, Any]
    adaptation: type[Any] | None
    adapt_fields: dict[str, Any]
    train: dict[str, Any]  # fields of [train] that this method has for itself
    own_adaptation: str | None = None  # its name, if it comes from the method's own table

    def table(self) -> dict[str, Any]:
        """The method's table of a config without its recipe: fields, and its own adaptation."""
        if self.own_adaptation is None:
            return self.fields
        return {**self.fields, "adapt": {"name": self.own_adaptation, **self.adapt_fields}}

    def build(self) -> "AnyAlgorithm":
        """Construct the algorithm, wrapped in its adaptation if there is one."""
        from ...adapt import Adapted

        algorithm: AnyAlgorithm = self.algorithm(**self.fields)
        if self.adaptation is None:
            return algorithm
        return Adapted(algorithm, self.adaptation(**self.adapt_fields))


def method_of(
    name: str,
    named: Mapping[str, dict[str, Any]],
    adapt: str,
    adapt_fields: dict[str, Any],
    code: Code,
) -> Method:
    """The method of a name, with its own fields or else those of the method that it adapts.

    Local training is never adapted: its models are trained on the client's own data already.
    """
    from ...adapt import ADAPTATIONS

    base, own = without_adaptation(name)
    told = named.get(name, named.get(base, {}))
    given = {field: value for field, value in told.items() if field not in OWN}
    train, table = told.get("train", {}), dict(told.get("adapt", {}))
    kind = algorithm_class(base, code)
    label = _label(name)
    if table:
        chosen = table.pop("name")
        return Method(name, label, kind, given, ADAPTATIONS[chosen], table, train, chosen)
    chosen = own if own != NONE or base == "local" else adapt
    if chosen == NONE:
        return Method(name, label, kind, given, None, {}, train)
    if own == NONE:
        label = _label(name, f"_{chosen}")
    fields = adapt_fields if adapt in (NONE, chosen) else {}
    return Method(name, label, kind, given, ADAPTATIONS[chosen], fields, train)


def _label(name: str, suffix: str = "") -> str:
    """The label of a method: its class if it is a user's own, its adaptation, and its variant."""
    plain, variant, tag = name.partition(VARIANT)
    return f"{plain.rpartition(':')[2].lower()}{suffix}{variant}{tag}"


def without_adaptation(name: str) -> tuple[str, str]:
    """The algorithm and the adaptation in a method's name: ``fedavg_ft`` is fedavg and ft."""
    from ...algorithms import ALIASES

    plain = name.partition(VARIANT)[0]
    return ALIASES.get(plain, (plain, NONE))


def algorithm_class(name: str, code: Code, where: str = "algorithm.name") -> Any:
    """The class of a name in ALGORITHMS or ALIASES, or a user's own ``package.module:Class``."""
    from ...algorithms import ALGORITHMS, ALIASES
    from ...core.algorithm import Algorithm

    base, _ = without_adaptation(name)
    tag = name.partition(VARIANT)[2]
    if VARIANT in name and not TAG.fullmatch(tag):
        raise ConfigError(
            f"{where}: found the variant '{name}'; expected up to 80 letters, digits or any of "
            f"._=+,- behind the {VARIANT}, as in fedfomo@5"
        )
    if base in ALGORITHMS:
        return ALGORITHMS[base]
    name = base
    if ":" not in name:
        known = did_you_mean(name, [*ALGORITHMS, *ALIASES, "package.module:Class"])
        raise ConfigError(f"{where}: no method is called '{name}'; {known}")
    return imported_dataclass(name, Algorithm, where, code)
