"""A site behind a unix socket: answers the ClientApp of Flower, which runs under another user.

One connection carries one message: the request until the other side has finished writing, then the
site's signature over request and answer, and the answer. The signature says which site it was,
whatever carried it.
"""

import contextlib
import hashlib
import logging
import secrets
import socket
import threading
import time
from pathlib import Path

from ..engines.remote import Answering
from . import keys
from .protocol import signed, unsigned
from .service import unix_socket
from .site_folder import SiteFolder

MOST_OPEN = 8  # connections at once; others are closed
PATIENCE, RATE = 30.0, 1 << 20  # seconds for a request, and bytes per second that add to them
HELLO = b"coterie hello "
_LOG = logging.getLogger(__name__)


def signed_answer(key: bytes, request: bytes, answer: bytes) -> bytes:
    """An answer behind the site's signature over it and over the request."""
    return f"{keys.sign(key, _both(request, answer))}\n".encode() + answer


def checked_answer(certificate: bytes, request: bytes, data: bytes) -> bytes:
    """What the certificate's owner answered to this request; refuses anything else."""
    signature, _, answer = data.partition(b"\n")
    keys.check_signature(certificate, _both(request, answer), signature.decode("ascii", "replace"))
    return answer


def hello(key: bytes, federation: str) -> bytes:
    """The operator's question to whoever has the socket: which site are you?"""
    return signed(HELLO + secrets.token_bytes(32), key, federation, "")


def _both(request: bytes, answer: bytes) -> bytes:
    found = (hashlib.sha256(part).hexdigest() for part in (request, answer))
    return f"coterie answer {' '.join(found)}".encode()


def serve(
    folder: SiteFolder,
    path: Path,
    handler: Answering,
    stop: threading.Event,
    turn: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Answer the messages that arrive at a socket until ``stop`` is set, one after another.

    Sites of one process have one ``turn``: torch's generator is the process's own.
    """
    turn, places = turn or threading.Lock(), threading.Semaphore(MOST_OPEN)
    key, most = folder.key.read_bytes(), folder.limits.message_mib * 2**20

    def answer(connection: socket.socket) -> None:
        try:
            with connection:
                request = _request(connection, most)
                asked = unsigned(request, folder.operator, folder.federation, "")
                if asked is not None and asked.startswith(HELLO):
                    reply = folder.name.encode()
                else:
                    with turn:
                        reply = handler.answer(request)
                connection.settimeout(PATIENCE)
                connection.sendall(signed_answer(key, request, reply))
        except OSError as error:
            _LOG.warning("a message was not answered: %s", error)
        except Exception:
            _LOG.exception("a message could not be answered")
        finally:
            places.release()

    path.parent.mkdir(mode=0o750, exist_ok=True)
    with contextlib.closing(unix_socket(path, 0o660)) as listening:
        listening.settimeout(0.2)
        _LOG.info("site '%s' answers at %s", folder.name, path)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = listening.accept()
                if places.acquire(blocking=False):
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()
                else:
                    connection.close()
        path.unlink(missing_ok=True)


def _request(connection: socket.socket, most: int) -> bytes:
    """What the other side writes; an OSError if it is too slow or writes too much."""
    data, begun = bytearray(), time.monotonic()
    while True:
        left = begun + PATIENCE + len(data) / RATE - time.monotonic()
        if left <= 0 or len(data) > most:
            raise OSError("it came too slowly" if left <= 0 else f"it has more than {most:,} bytes")
        connection.settimeout(left)
        piece = connection.recv(1 << 20)
        if not piece:
            return bytes(data)
        data += piece
