"""How many files of the package a command calls functions of: counted by a profiler."""

import subprocess
import sys
from pathlib import Path

import pytest

import coterie

SOURCE = Path(coterie.__file__).parent
CODE = """
import sys
from pathlib import Path
source, files = sys.argv.pop(1), set()

def called(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(source) or not code.co_flags & 1:
        return  # the flag leaves out bodies of classes
    above = frame
    while above is not None:  # what runs while a module is imported does not count
        if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(source):
            return
        above = above.f_back
    files.add(code.co_filename)

from coterie.cli import main
sys.setprofile(called)
try:
    main(sys.argv[1:])
except SystemExit:
    pass
sys.setprofile(None)
print("\\n".join(sorted(files)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "most"),
    [
        (["run", "--method", "fedfomo"], 90),
        (["compare", "--methods", "local,fedavg,fedfomo"], 110),
    ],
    ids=["run", "compare"],
)
def test_a_command_crosses_few_files(tmp_path, command, most):
    small = ["--rounds", "2", "--clients", "3", "--model", "linear", "--engine", "loop"]
    asked = [*command, *small, "--set", "run.checkpoint_every=1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, f"{SOURCE}/", *asked],
        capture_output=True,
        text=True,
        check=True,
    )
    files = [line for line in done.stderr.splitlines() if line.startswith(str(SOURCE))]
    assert (tmp_path / "out").is_dir()  # the command did its work
    assert 50 < len(files) <= most
