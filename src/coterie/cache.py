"""Where the user's machine remembers what is slow to find out or to make.

The folder is ``$COTERIE_CACHE``, else ``$XDG_CACHE_HOME/coterie``, else ``~/.cache/coterie``. It
may be deleted at any time.
"""

import os
from pathlib import Path


def folder() -> Path:
    """The folder, which need not exist."""
    if own := os.environ.get("COTERIE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie"
