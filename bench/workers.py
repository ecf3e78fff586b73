"""The driver's side of the line protocol: a worker's processes, its answers, and its silence.

A worker lives in a session of its own. Between its turns every process of that session is stopped,
so that what idles noisily (Ray) does not slow whoever is timed. Linux only: sessions are read from
/proc.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

SETTLE = 0.3  # seconds between waking a worker and asking it, for its overdue timers


class PeerError(Exception):
    """A worker that cannot be had, died, fell silent or answered something else."""


class Worker:
    """One peer's process, its answers line by line, and a file with what else it wrote."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ready(self, limit: float) -> dict[str, str]:
        """What the worker says of itself once it is built and warm; it is paused after that."""
        said = self._read(limit)
        if not isinstance(said.get("version"), str) or not isinstance(said.get("setting"), str):
            raise PeerError(f"answered {said}; expected its version and setting")
        self.pause()
        return {"version": said["version"], "setting": said["setting"]}

    def round(self, limit: float) -> float:
        """The seconds of one round, as the worker measured them."""
        self.wake()
        time.sleep(SETTLE)
        try:
            self._write("round")
            seconds = self._read(limit).get("seconds")
        finally:
            self.pause()
        if not isinstance(seconds, float) or not seconds > 0:
            raise PeerError(f"answered {seconds!r}; expected the seconds of a round")
        return seconds

    def pause(self) -> None:
        """Stop every process of the worker."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let every process of the worker go on."""
        self._signal(signal.SIGCONT)

    def close(self, limit: float = 20) -> None:
        """Ask the worker to end; end whatever of it is left after a while."""
        self.wake()
        if self._process.poll() is None:
            self._write("quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._listener.join(5)

    def _write(self, word: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead: reading says so
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())

    def _listen(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # the end

    def _read(self, limit: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise PeerError(f"said nothing for {limit:.0f} s{self._last_words()}") from None
        if not line:
            self._lines.put("")  # it stays the end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise PeerError(f"ended with code {self._process.poll()}{self._last_words()}")
        with contextlib.suppress(json.JSONDecodeError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        raise PeerError(f"answered {line.strip()[:80]!r}; expected a JSON object")

    def _last_words(self) -> str:
        """The last line that the worker wrote beside its answers."""
        lines = self._log.read_text(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"; its last line: {said[-1][:200]}" if said else ""

    def _signal(self, number: signal.Signals) -> None:
        for pid in members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def members(session: int) -> list[int]:
    """The processes of a session, whatever group they moved to."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            state, home = fields[0], int(fields[3])
            if home == session and state not in "ZX":
                found.append(int(folder.name))
    return found
