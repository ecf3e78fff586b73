"""What the long-running programs of a federation share: signals, logs, sockets, health, metrics."""

import contextlib
import json
import logging
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import ConfigError, StoreError
from .documents import host_and_port

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

HANGS = 30.0  # seconds after which a program that has not looked at its signals is not healthy
_NOISY = ("httpx", "httpcore", "uvicorn.error", "uvicorn.access")


class Ending(threading.Event):
    """Set when the program shall end. It is healthy while it looks at this again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = time.monotonic()

    def is_set(self) -> bool:
        """Whether the program shall end."""
        self.looked = time.monotonic()
        return super().is_set()


@contextlib.contextmanager
def stopping(*, json_lines: bool = False) -> Iterator[Ending]:
    """An event that SIGTERM and SIGINT set; log lines go to stderr meanwhile."""
    shown = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    shown.setFormatter(_JsonLines() if json_lines else plain)
    logging.basicConfig(level=logging.INFO, handlers=[shown])
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    stop = Ending()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _JsonLines(logging.Formatter):
    """A log line as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        said["message"] = record.getMessage()
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said)


# ---- health and metrics --------------------------------------------------------------------------


class Measure(NamedTuple):
    """One number of a program, with the values of its labels."""

    name: str
    kind: Literal["counter", "gauge"]
    said: str
    labels: dict[str, str]
    value: float


@contextlib.contextmanager
def monitored(
    where: str | None, stop: Ending, measures: Callable[[], Iterable[Measure]]
) -> Iterator[None]:
    """Answer ``/healthz`` and ``/metrics`` at [HOST:]PORT meanwhile; on loopback without a host."""
    if where is None:
        yield
        return
    host, port = host_and_port(where if ":" in where else f"127.0.0.1:{where}")
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise ConfigError(
            f"--monitor: {error}; expected the official client of Prometheus; pip install "
            "'coterie[metrics]'"
        ) from error
    registry = _registry(measures)

    def told(path: str) -> tuple[int, bytes]:
        if path == "/healthz":
            healthy = time.monotonic() - stop.looked < HANGS
            return (200, b"ok\n") if healthy else (503, b"hangs\n")
        if path == "/metrics":
            return 200, generate_latest(registry)
        return 404, b"there are /healthz and /metrics\n"

    try:
        server = ThreadingHTTPServer((host, port), _answering(told))
    except OSError as error:
        raise ConfigError(
            f"--monitor: port {port} cannot be opened ({error.strerror or error}); expected one "
            "that nobody uses; choose another"
        ) from None
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def _answering(told: Callable[[str], tuple[int, bytes]]) -> type[BaseHTTPRequestHandler]:
    """A handler of requests that answers each path by a status and a text."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds for a request

        def do_GET(self) -> None:
            status, body = told(self.path)
            self.send_response(status)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    return Handler


def _registry(measures: Callable[[], Iterable[Measure]]) -> "CollectorRegistry":
    """What Prometheus collects: the measures, and the process's memory, time and open files."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class Collected(Collector):
        def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
            found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
            for name, kind, said, labels, value in measures():
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = found.setdefault(name, make(name, said, labels=[*labels]))
                metric.add_metric([*labels.values()], value)
            return found.values()

    registry = CollectorRegistry()
    registry.register(Collected())
    ProcessCollector(registry=registry)
    return registry


# ---- sockets -------------------------------------------------------------------------------------


def unix_socket(path: Path, mode: Literal[0o600, 0o660]) -> socket.socket:
    """A listening unix socket of this mode; one that a killed process left is replaced.

    Its folder has to keep out everybody whom the mode keeps out.
    """
    allowed = 0o750 if mode & stat.S_IRWXG else 0o700
    found = stat.S_IMODE(path.parent.stat().st_mode)
    if found & 0o077 & ~allowed:
        raise StoreError(
            f"{path.parent}: other users have access to this folder (mode {found:o}); expected "
            f"mode {allowed:o}, because this process is reached from it; chmod {allowed:o} "
            f"{path.parent}"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        listening.bind(str(path))
        path.chmod(mode)
        listening.listen()
    except OSError as error:
        listening.close()
        raise StoreError(
            f"{path}: cannot be opened ({error.strerror or error}); expected a short path (about "
            "100 characters) at which nothing lies; move the folder, or remove what lies there"
        ) from None
    return listening
