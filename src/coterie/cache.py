"""Where the user's machine remembers what is slow to find out or to make.

The folder is ``$COTERIE_CACHE``, else ``$XDG_CACHE_HOME/coterie``, else ``~/.cache/coterie``. It
may be deleted at any time. A user without a home folder (in many containers) has a folder of this
process alone, which is removed at its end: a fixed name in ``/tmp`` could be somebody else's.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from .files import expanded


def folder() -> Path:
    """The folder, which need not exist."""
    if own := os.environ.get("COTERIE_CACHE"):
        return expanded(own)
    if Path(shared := os.environ.get("XDG_CACHE_HOME", "")).is_absolute():
        return Path(shared) / "coterie"
    try:
        return Path.home() / ".cache" / "coterie"
    except RuntimeError:
        return _of_this_process()


@functools.cache
def _of_this_process() -> Path:
    made = tempfile.mkdtemp(prefix="coterie-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)
