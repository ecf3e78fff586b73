"""Fields of a config that had other names in earlier versions: ``engine.trace`` was ``play``.

Configs may use the old name for one release, with a warning. Folders of earlier versions have it
for good, and hashes of configs are computed with it, so that an old folder is recognised.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, CoterieWarning

TABLE, OLD, NEW = "engine", "play", "trace"


def renamed(tables: Mapping[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """The tables with all fields under the names that they have now."""
    engine = tables.get(TABLE)
    if not isinstance(engine, Mapping) or OLD not in engine:
        return dict(tables)
    if NEW in engine:
        raise ConfigError(
            f"{TABLE}.{NEW}, {TABLE}.{OLD}: found both; they are one field; keep {TABLE}.{NEW}"
        )
    if warn:
        text = f"{TABLE}.{OLD} is now {TABLE}.{NEW}; the next release refuses the old name"
        warnings.warn(text, CoterieWarning, stacklevel=2)
    return {**tables, TABLE: {NEW if name == OLD else name: engine[name] for name in engine}}


def with_old_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with all fields under the names that hashes are computed with."""
    engine = tables[TABLE]
    return {**tables, TABLE: {OLD if name == NEW else name: engine[name] for name in engine}}
