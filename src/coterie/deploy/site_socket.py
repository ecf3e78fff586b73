"""A site behind a unix socket: answers the ClientApp of Flower, which runs under another user.

One connection carries one message: the operator's signed head, then what it announces. Nothing else
is read, and one message at a time is in memory. The answer is behind the site's signature over head
and answer, which says which site it was, whatever carried it.
"""

import contextlib
import hashlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..engines.codec import refusal
from ..engines.remote import Answering
from . import keys
from .protocol import HEAD, announced, signed
from .service import unix_socket
from .site_folder import SiteFolder

MOST_OPEN = 8  # connections at once; others are closed
PATIENCE, RATE = 30.0, 1 << 20  # seconds for a request, and bytes per second that add to them
PIECE = 1 << 18  # bytes that are read at once
SKIPPED = 1 << 20  # bytes of strangers that are read and thrown away, so that they hear the answer
_LOG = logging.getLogger(__name__)


def signed_answer(key: bytes, request: bytes, answer: bytes) -> bytes:
    """An answer behind the site's signature over it and over the request's head."""
    return f"{keys.sign(key, _both(request, answer))}\n".encode() + answer


def checked_answer(certificate: bytes, request: bytes, data: bytes) -> bytes:
    """What the certificate's owner answered to this request; refuses anything else."""
    signature, _, answer = data.partition(b"\n")
    keys.check_signature(certificate, _both(request, answer), signature.decode("ascii", "replace"))
    return answer


def hello(key: bytes, federation: str) -> bytes:
    """The operator's question to whoever has the socket: which site are you?

    It is the only message that is signed for any site.
    """
    return signed(secrets.token_bytes(32), key, federation, "")


def _both(request: bytes, answer: bytes) -> bytes:
    """What a site signs: the head names the message's sha256."""
    found = (hashlib.sha256(part).hexdigest() for part in (request[:HEAD], answer))
    return f"coterie answer {' '.join(found)}".encode()


class _Served(NamedTuple):
    """A site, and what takes turns there."""

    folder: SiteFolder
    key: bytes
    handler: Answering
    turn: contextlib.AbstractContextManager[object]  # of all sites of the process
    one_at_a_time: contextlib.AbstractContextManager[object]  # message of this site


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
    places, key = threading.Semaphore(MOST_OPEN), folder.key.read_bytes()
    site = _Served(folder, key, handler, turn or threading.Lock(), threading.Lock())

    def answer(connection: socket.socket) -> None:
        try:
            with connection:
                _answer(site, connection)
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


def _answer(site: _Served, connection: socket.socket) -> None:
    """Read one message, if the operator announces it, and answer it."""
    folder, key, handler, turn, one_at_a_time = site
    head = b"".join(_pieces(connection, HEAD))
    for_all, size = (
        announced(head, folder.operator, folder.federation, name) for name in ("", folder.name)
    )
    if size is None:
        _skip(connection, SKIPPED)
        said = refusal("unsigned", "expected a message signed by the operator")
        return _send(connection, key, head, folder.name.encode() if for_all else said)
    with one_at_a_time:
        if size > (most := handler.largest()):
            _skip(connection, size)
            why = f"found a message of {size:,} bytes; expected at most {most:,}"
            return _send(connection, key, head, refusal("policy", why))
        request = bytearray(head)
        for piece in _pieces(connection, size):
            request += piece
        if len(request) < HEAD + size:
            raise OSError("it was cut short")
        with turn:
            reply = handler.answer(bytes(request))
        return _send(connection, key, head, reply)


def _send(connection: socket.socket, key: bytes, head: bytes, reply: bytes) -> None:
    connection.settimeout(PATIENCE + len(reply) / RATE)
    connection.sendall(signed_answer(key, head, reply))


def _skip(connection: socket.socket, size: int) -> None:
    """Read and throw away what the other side still writes, so that it comes to read the answer."""
    for _ in _pieces(connection, size):
        pass


def _pieces(connection: socket.socket, size: int) -> Iterator[bytes]:
    """At most so many bytes of what the other side writes; an OSError if it is too slow."""
    begun, got = time.monotonic(), 0
    while got < size:
        left = begun + PATIENCE + got / RATE - time.monotonic()
        if left <= 0:
            raise OSError("it came too slowly")
        connection.settimeout(left)
        piece = connection.recv(min(size - got, PIECE))
        if not piece:
            return
        got += len(piece)
        yield piece
