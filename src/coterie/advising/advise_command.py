"""``coterie advise``: stay local, average, cluster or personalise?"""

import sys
from typing import Annotated, Any

from ..commands.arguments import JSON, configured


@configured
def advise(
    config: str | None, given: dict[str, Any], as_json: Annotated[bool, JSON] = False
) -> None:
    """Probe a federation for a minute: stay local, average, cluster or personalise?

    Methods of every kind are run for a few rounds on the same clients. The answer comes with its
    evidence, and may be that the probe cannot tell. With --out a probe can be continued.
    """
    from ..commands.console import show, show_json
    from ..commands.live import watching
    from .advice import advise_config, probe_config

    asked = probe_config(config, **given)
    methods, seeds, rounds = len(asked.methods()), len(asked.seeds), asked.run.rounds
    with watching(asked, methods * seeds) as watch:
        told = f"probe: {methods} methods x {seeds} seeds x {rounds} rounds"
        print(told, file=sys.stderr, flush=True)
        found = advise_config(asked, [watch])
    if as_json:
        show_json(found.to_dict())
        return
    show(found)
    if found.comparison.path is not None:
        show(f"\nfolder: {found.comparison.path}")
