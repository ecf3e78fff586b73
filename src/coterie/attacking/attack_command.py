"""``coterie attack``: what dishonest clients do to every method."""

from typing import Annotated, Any

import typer

from ..commands.arguments import JSON, configured


@configured
def attack(
    config: str | None,
    given: dict[str, Any],
    attacks: Annotated[
        str, typer.Option(metavar="A1,...", help="attacks A1 to A10 (docs/results/robustness.md)")
    ] = "",
    shares: Annotated[str, typer.Option(help="shares of clients that attack")] = "0.2",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Attack a federation: what every method loses, as configured and guarded, and who is hurt."""
    from ..api import configure
    from ..commands.console import show, show_json
    from ..commands.live import watching
    from ..errors import ConfigError
    from .attacks import ATTACKS
    from .robustness import attack_config, methods_of

    try:
        parts = [float(part) for part in shares.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--shares: found '{shares}'; expected numbers, as in 0.05,0.2") from None
    names = [name.strip() for name in attacks.split(",") if name.strip()] or list(ATTACKS)
    asked = configure(config, **given)
    runs = len(methods_of(asked)) * len(asked.seeds) * 2 * (1 + len(names) * len(parts))
    with watching(asked, runs) as watch:
        found = attack_config(asked, names, parts, [watch])
    if as_json:
        show_json(found.to_dict())
    else:
        show(found)
