"""Runs in processes of their own that can be killed, without waiting for torch each time.

A fork server imports everything and runs once (:mod:`warm`); every run here is a fork of it.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["coterie.cli", "warm"])


def _serve() -> None:
    """Start the server where it finds this folder: of the path it is given, 3.11 makes no use."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _work(arguments: list[str], changes: dict[str, str], limit: int | None, said: str) -> None:
    """The command line, as in a new process: usual signals, one thread, stderr into a file."""
    import resource

    import torch

    from coterie.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(changes)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(said + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main(arguments)


def started(
    arguments: list[Any], said: Path, fault: str | None = None, limit: int | None = None
) -> BaseProcess:
    """A command that runs by itself."""
    keep = ("COTERIE_CACHE",)
    changes = {name: os.environ[name] for name in keep if name in os.environ}
    if fault is not None:
        changes["COTERIE_FAULT"] = fault
    words = [str(argument) for argument in arguments]
    _serve()
    process = _SERVER.Process(target=_work, args=(words, changes, limit, str(said)), daemon=True)
    process.start()
    return process


def finished(process: BaseProcess, seconds: float = 120) -> int:
    """The exit code; negative is the signal that ended it."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still running after {seconds} seconds")
    return process.exitcode


def command(arguments: list[Any], said: Path, **options: Any) -> int:
    """Run a command to its end."""
    return finished(started(arguments, said, **options))


def until(path: Path, seconds: float = 60) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} has not appeared after {seconds} seconds")
        time.sleep(0.005)
