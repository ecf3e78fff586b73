"""How many files of the package a command calls functions of: counted by a profiler."""

import os
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
    if event != "call" or code.co_filename in files or not code.co_filename.startswith(source):
        return
    if not code.co_flags & 1:  # the body of a class
        return
    above = frame
    while above is not None:  # what runs while a module is imported does not count
        if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(source):
            return
        above = above.f_back
    files.add(code.co_filename)

%s
sys.setprofile(None)
print("\\n".join(sorted(files)), file=sys.stderr)
"""
COMMAND = """
from coterie.cli import main
sys.setprofile(called)
try:
    main(sys.argv[1:])
except SystemExit:
    pass
"""
FEDERATION = """
import asyncio, threading
import coterie
from coterie.deploy.coordinator import Coordinator
from coterie.deploy.direct import serve
from coterie.deploy.mailbox import Limits
from coterie.deploy.local_federation import free_port
from sites import *
home = Path(sys.argv.pop(1))
folders = site_folders(home, write_tables(home / "data"), address=f"localhost:{free_port()}")
handlers = {name: handler_of(folder) for name, folder in folders.items()}
fed, stop = FederationFolder.open(home / "fed"), threading.Event()
works = [lambda: asyncio.run(Coordinator(fed, Limits(2**20)).serve(stop))]
works += [lambda n=n: serve(folders[n], handlers[n], stop) for n in folders]
threading.setprofile(called)
threads = [threading.Thread(target=work) for work in works]
for thread in threads:
    thread.start()
while not fed.socket.exists():
    stop.wait(0.1)
sys.setprofile(called)
asked = FAST | {"algorithm": {"name": "fedfomo"}, "run": {"rounds": 1}}
coterie.run(asked, federation=str(fed.path), out=str(home / "out"))
stop.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(
    ("command", "most"),
    [(["run", "--method", "fedfomo"], 90), (["compare", "--methods", "local,fedavg,fedfomo"], 110)],
    ids=["run", "compare"],
)
def test_a_command_crosses_few_files(tmp_path, command, most):
    small = ["--rounds", "2", "--clients", "3", "--model", "linear", "--engine", "loop"]
    asked = [*command, *small, "--set", "run.checkpoint_every=1", "--out", str(tmp_path / "out")]
    files = crossed(COMMAND, *asked)
    assert (tmp_path / "out").is_dir()  # the command did its work
    assert 50 < len(files) <= most


def test_a_federation_crosses_few_files(tmp_path):
    """Operator, coordinator and three sites, over loopback, from the first question to the page."""
    files = crossed(FEDERATION, str(tmp_path), PYTHONPATH=str(Path(__file__).parent))
    assert (tmp_path / "out" / "report.html").is_file()
    ran = {file.rpartition("/")[2] for file in files}
    assert {"coordinator.py", "mailbox.py", "direct.py", "handler.py", "federated.py"} <= ran
    assert 50 < len(files) <= 120


def crossed(work: str, *asked: str, **environment: str) -> list[str]:
    """The files of the package whose functions a program calls."""
    found = ":".join(filter(None, (os.environ.get("PYTHONPATH"), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", CODE % work, f"{SOURCE}/", *asked],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": found},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if line.startswith(str(SOURCE))]
