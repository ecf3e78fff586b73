"""A method as a config names it: an algorithm, its fields, and the adaptation that follows it."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.imports import Code, imported
from ...errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ...core.algorithm import AnyAlgorithm

NONE = "none"


class Method(NamedTuple):
    """One method of a config: its class, its fields, and its adaptation if it has one."""

    name: str  # in the config
    label: str  # in tables of results and names of folders
    algorithm: type[Any]
    fields: dict[str, Any]
    adaptation: type[Any] | None
    adapt_fields: dict[str, Any]

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
    chosen = own if own != NONE or base == "local" else adapt
    given = named.get(name, named.get(base, {}))
    label = base.rpartition(":")[2].lower()
    kind = algorithm_class(base, code)
    if chosen == NONE:
        return Method(name, label, kind, given, None, {})
    fits = adapt in (NONE, chosen)
    return Method(
        name,
        f"{label}_{chosen}",
        kind,
        given,
        ADAPTATIONS[chosen],
        adapt_fields if fits else {},
    )


def without_adaptation(name: str) -> tuple[str, str]:
    """The algorithm and the adaptation in a method's name: ``fedavg_ft`` is fedavg and ft."""
    from ...algorithms import ALIASES

    return ALIASES.get(name, (name, NONE))


def algorithm_class(name: str, code: Code, where: str = "algorithm.name") -> Any:
    """The class of a name in ALGORITHMS or ALIASES, or a user's own ``package.module:Class``."""
    from ...algorithms import ALGORITHMS, ALIASES
    from ...core.algorithm import Algorithm

    base, _ = without_adaptation(name)
    if base in ALGORITHMS:
        return ALGORITHMS[base]
    if ":" not in name:
        known = did_you_mean(name, [*ALGORITHMS, *ALIASES, "package.module:Class"])
        raise ConfigError(f"{where}: no method is called '{name}'; {known}")
    found = imported(name, Algorithm, where, code)
    if not is_dataclass(found):
        raise ConfigError(
            f"{where}: '{name}' is {found!r}; expected a dataclass that extends coterie.Algorithm"
        )
    return found
