"""A SuperLink as a child process: on loopback, in memory, without code, started again if it ends.

The link has no database. Messages, keys and runs are in its memory alone, so that nothing that a
site or the server sends is ever written to disk; the coordinator registers the sites' keys and
begins its run again after the link was killed. `--isolation process` and a secret for tasks: the
link starts no process, and only the coordinator takes its run's task.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from . import keys
from .small_files import write_private, write_public

HOST = "127.0.0.1"
QUIET = {  # the settings of flwr; all others of the environment are left out
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlowerLink:
    """Where the link is and how it is known: made anew whenever the coordinator starts."""

    path: Path  # a folder of this user alone, for the link's certificate and secret
    port: int
    secret: bytes  # who has it may take the tasks of runs

    @classmethod
    def create(cls, path: Path) -> "FlowerLink":
        """Write a certificate for loopback and a secret; choose a free port."""
        path.mkdir(mode=0o700, exist_ok=True)
        ca, ca_key = keys.make_ca("link")
        server, server_key = keys.make_server(ca, ca_key, HOST)
        secret = secrets.token_bytes(32)
        write_public(path / "ca.pem", ca)
        write_public(path / "server.pem", server)
        write_private(path / "server.key", server_key)
        write_private(path / "secret", secret)
        return cls(path, _free_port(), secret)

    @property
    def address(self) -> str:
        """HOST:PORT of the link."""
        return f"{HOST}:{self.port}"

    def trust(self) -> ssl.SSLContext:
        """TLS settings for calls to this link and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.path / "ca.pem")
        return context

    def command(self) -> list[str]:
        """The command that starts the link."""
        return [
            *(sys.executable, "-P", "-m", __name__),
            *("--host", HOST, "--port", str(self.port)),
            *("--ssl-ca-certfile", str(self.path / "ca.pem")),
            *("--ssl-certfile", str(self.path / "server.pem")),
            *("--ssl-keyfile", str(self.path / "server.key")),
            *("--superexec-auth-secret-file", str(self.path / "secret")),
            *("--isolation", "process"),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ]

    def environment(self) -> dict[str, str]:
        """The environment of the link: none of flwr's settings but those in QUIET."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        return {**kept, **QUIET, "FLWR_HOME": str(self.path)}

    async def keep(self) -> None:
        """Run the link for ever; one that ends is started again. Cancelled, it is ended."""
        pause = 0.2
        while True:
            begun = asyncio.get_running_loop().time()
            pipe = asyncio.subprocess.PIPE  # the link ends when this process does
            process = await asyncio.create_subprocess_exec(
                *self.command(), stdin=pipe, env=self.environment()
            )
            _LOG.info("the SuperLink has started (process %s)", process.pid)
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            ran = asyncio.get_running_loop().time() - begun
            pause = 0.2 if ran > 60 else min(2 * pause, 10.0)
            _LOG.warning("the SuperLink ended with code %s; it is started again", code)
            await asyncio.sleep(pause)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Run flwr's SuperLink in this process until the coordinator's process ends."""
    from flwr.superlink.cli import flower_superlink

    def watch() -> None:
        os.read(0, 1)  # nothing is sent: it returns when the coordinator has ended
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    flower_superlink()


if __name__ == "__main__":
    main()
