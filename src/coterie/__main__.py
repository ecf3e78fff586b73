"""``python -m coterie``: the command line.

Python puts the current directory first on the path of a module that is run so, where any folder of
results could then bring a module of its own. It is taken off before anything else is imported;
``python -P -m coterie`` does not put it there at all, nor does the command ``coterie``.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]

    from .cli import main

    main()
