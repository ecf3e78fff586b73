"""``coterie attack``: what dishonest clients do to every method."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..commands.arguments import JSON, configured

if TYPE_CHECKING:
    from .exposed_rows import ExposedRows
    from .robustness import Robustness


@configured
def attack(
    config: str | None,
    given: dict[str, Any],
    attacks: Annotated[
        str, typer.Option(metavar="A1,...", help="attacks A1 to A10 (docs/results/robustness.md)")
    ] = "",
    shares: Annotated[str, typer.Option(help="shares of clients that attack")] = "0.2",
    exposure: Annotated[
        bool, typer.Option("--exposure", help="instead: what models tell of the rows behind them")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Attack a federation: what every method loses, as configured and guarded, and who is hurt.

    With --exposure: which rows FedAvg's, FedFomo's and FedeRiCo's models give away, by noise.
    """
    from ..api import configure
    from ..commands.live import watching
    from ..errors import ConfigError
    from .attacks import ATTACKS
    from .exposed_rows import exposed_rows, shadow_runs
    from .robustness import attack_config, methods_of

    asked = configure(config, **given)
    if exposure:
        with watching(asked, shadow_runs(asked)) as watch:
            _show(exposed_rows(asked, [watch]), as_json)
        return
    try:
        parts = [float(part) for part in shares.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--shares: found '{shares}'; expected numbers, as in 0.05,0.2") from None
    names = [name.strip() for name in attacks.split(",") if name.strip()] or list(ATTACKS)
    runs = len(methods_of(asked)) * len(asked.seeds) * 2 * (1 + len(names) * len(parts))
    with watching(asked, runs) as watch:
        _show(attack_config(asked, names, parts, [watch]), as_json)


def _show(found: "ExposedRows | Robustness", as_json: bool) -> None:
    from ..commands.console import show, show_json

    show_json(found.to_dict()) if as_json else show(found)
