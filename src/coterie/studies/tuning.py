"""Searches hyper-parameters on validation data, with the same number of trials for every method.

import coterie
found = coterie.tune("experiment.toml", out="runs/tuned")   # what its table [tune] says
print(found)          # the best values of every method
print(found.toml())   # the same as TOML
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.imports import Code, Given
from ..errors import ConfigError
from ..experiment.config.loading import TUNE, merge, read, tables_of
from ..experiment.config.schema import Config, Table
from ..experiment.config.sweeps import with_variants
from ..experiment.runner import Watch
from .card_file import PAPER, Card, merged
from .reproducing import card_of
from .study import Study, restricted, study_of
from .tune_plan import read_plan
from .tune_search import Tuning
from .tuned import Tuned, toml_value

Tunable = Mapping[str, Any] | str | Path
SCALE = "tuned"  # of a card, for values that were searched at the paper's scale
MERGED = (
    "train.merge_val = true was set to false for the search: a choice needs validation data that "
    "was not trained on"
)


def tune(
    source: Tunable,
    *,
    scale: str = PAPER,
    trials: int | None = None,
    seeds: int | None = None,
    number: str | None = None,
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as in coterie.run
    out: str | Path | None = None,
    code: Given = None,
    progress: Watch | None = None,
) -> Tuned:
    """Search the fields that the table ``[tune]`` of a config or a card names (docs/tune.md).

    ``source`` is a config (a file or tables), or a card (its file or its id). With ``out`` a search
    that was killed is continued, and no finished trial is run again.
    """
    given = {"trials": trials, "seeds": seeds, "number": number}
    changes = dict(set or {})
    changes |= {f"{TUNE}.{name}": value for name, value in given.items() if value is not None}
    found = tuning_of(
        source, scale, changes, methods=tuple(methods), columns=tuple(columns), code=code
    )
    return replace(found, out=None if out is None else Path(out)).run(progress)


def tuning_of(
    source: Tunable,
    scale: str = PAPER,
    changes: Mapping[str, Any] | None = None,
    *,
    methods: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    code: Given = None,
) -> Tuning:
    """What searches the fields of a config or a card; nothing is run yet.

    The folder is one that is named after the source.
    """
    given, allowed, card = dict(changes or {}), Code.of(code, installed=True), _card(source)
    told = str(source) if isinstance(source, str | Path) else ""
    if card is None:
        study, tables = _of_config(source, given, allowed)
    elif card.about.waits:
        raise ConfigError(f"{card.about.id} cannot be run yet: {card.about.waits}")
    else:
        study = card.study(scale, given, allowed)
        tables = merge(merged(card.tables, card.scales.get(scale, {})), given)
    try:
        plan = read_plan(tables.get(TUNE), [method.name for method in study.methods])
        asked = restricted(study, columns, methods, plan.seeds)
        apart = tuple(c._replace(config=_unmerged(c.config)) for c in asked.columns)
        merging = any(column.config.train.merge_val for column in asked.columns)
        chosen = tuple(m for m in asked.methods if not methods or m.label in methods)
        if not chosen:
            raise ConfigError(f"--methods: the columns have none of {', '.join(methods)}")
        at = f" --scale {scale}" if card is not None and scale != PAPER else ""
        at += "".join(f" --set '{field}={toml_value(v)}'" for field, v in given.items())
        made = Tuning(
            study=replace(asked, columns=apart),
            plan=plan,
            methods=chosen,
            out=Path("runs") / f"{study.name}{'' if card is None else f'-{scale}'}-tune",
            command=f"coterie tune {told}{at}" if told else "coterie.tune(...)",
            notes=(MERGED,) if merging else (),
            under=None if card is None else SCALE if scale == PAPER else scale,
        )
        made.check()
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}" if told else str(error)) from None
    return made


def _of_config(source: Tunable, given: dict[str, Any], code: Code) -> tuple[Study, Table]:
    """The study of a config, and its tables."""
    tables = with_variants(merge(tables_of(source, given), given))
    run = tables.get("run", {})
    apart = {f: v for f, v in run.items() if f != "out"} if isinstance(run, Mapping) else run
    name = Path(str(source)).stem if isinstance(source, str | Path) else TUNE
    return study_of({**tables, "run": apart}, code, name=name), tables


def _card(source: Tunable) -> Card | None:
    """The card of this source; None if it is a config."""
    if isinstance(source, Mapping):
        return None
    path = Path(source)
    if path.suffix in (".toml", ".json"):
        return card_of(str(source)) if path.suffix == ".toml" and "card" in read(path) else None
    return card_of(str(source))


def _unmerged(config: Config) -> Config:
    train = config.train.model_copy(update={"merge_val": False})
    return config.model_copy(update={"train": train})
