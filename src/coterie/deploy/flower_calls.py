"""Calls of Flower's HTTP interfaces: one protobuf message each way, bounded, without retries.

flwr's own clients answer a refused call by ending the process or sending it a signal. A site's
agent and the coordinator must survive both, so that a refusal is an exception here and nothing
else. Signatures, headers and messages are flwr's.
"""

import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import CoterieError
from .flower_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    PROTOBUF_MEDIA_TYPE,
    TASK_TOKEN_HEADER,
    TIMESTAMP_HEADER,
    DecodeError,
    Proto,
    RuntimeVersionMetadata,
    bytes_to_private_key,
    create_superexec_auth_metadata,
    derive_auth_secret,
    httpx,
    now,
    public_key_to_bytes,
    sign_message,
)

MOST = 8 * 2**20  # bytes of one call's body, either way; a message travels in smaller pieces
_PASSING = (408, 429, 500, 502, 503, 504)  # starting, ending or overloaded: it will pass
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"

Answer = TypeVar("Answer", bound=Proto)
Sign = Callable[[Proto], Mapping[str, str]]


class LinkLostError(CoterieError):
    """A call without an answer: no connection, a server error, or an answer that is too large."""


class LinkRefusedError(CoterieError):
    """A call that was refused: the caller, its run or its message is not known any more."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.unknown = status == httpx.codes.UNAUTHORIZED  # the caller, not what it asked for


class Calls:
    """Calls one Flower server. ``sign`` gives the headers that say who calls."""

    def __init__(self, http: httpx.Client, sign: Sign) -> None:
        self._http, self._sign = http, sign
        version = RuntimeVersionMetadata.from_local_component("coterie").as_metadata()
        form = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        self._headers = {**dict(version), **form, "accept-encoding": "identity"}

    def __call__(
        self, path: str, request: Proto, answer: type[Answer], seconds: float = 30.0
    ) -> Answer:
        """The answer to one call of at most this many seconds without a byte."""
        content = request.SerializeToString(deterministic=True)
        headers = {**self._headers, **self._sign(request)}
        try:
            with self._http.stream(
                "POST", path, content=content, headers=headers, timeout=seconds
            ) as response:
                data = _bounded(response, path)
        except (httpx.HTTPError, ssl.SSLError) as error:
            raise LinkLostError(f"{path}: {type(error).__name__}: {error}") from None
        if response.status_code in _PASSING:
            raise LinkLostError(f"{path}: status {response.status_code}")
        if response.status_code != httpx.codes.OK:
            status = response.status_code
            raise LinkRefusedError(f"{path}: status {status}: {data[:200]!r}", status)
        return _parsed(data, answer, path)


def _bounded(response: httpx.Response, path: str) -> bytes:
    data = bytearray()
    for piece in response.iter_raw():
        data += piece
        if len(data) > MOST:
            raise LinkLostError(f"{path}: found an answer of more than {MOST} bytes")
    return bytes(data)


def _parsed(data: bytes, answer: type[Answer], path: str) -> Answer:
    made: Answer = answer()
    try:
        made.ParseFromString(data)
    except DecodeError:
        raise LinkLostError(f"{path}: found no {answer.__name__} in the answer") from None
    return made


def over_tls(address: str, tls: ssl.SSLContext, *, proxies: bool) -> httpx.Client:
    """Connections to HOST:PORT, through a proxy if the environment names one and it is wanted."""
    return httpx.Client(base_url=f"https://{address}", verify=tls, trust_env=proxies)


# ---- who calls -----------------------------------------------------------------------------------


def nobody(_request: Proto) -> Mapping[str, str]:
    """The headers of the Control interface, which has no authentication: it is on loopback."""
    return {}


def as_node(key_pem: bytes) -> tuple[Sign, bytes]:
    """The headers of a site's node, signed with the site's key, and its public key as PEM."""
    key = bytes_to_private_key(key_pem)
    public = public_key_to_bytes(key.public_key())
    encoded = b64encode(public).decode("ascii")

    def sign(_request: Proto) -> Mapping[str, str]:
        timestamp = now().isoformat()
        signature = sign_message(key, timestamp.encode("ascii"))
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: encoded,
            TIMESTAMP_HEADER: timestamp,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
        }

    return sign, public


def as_task(token: str) -> Sign:
    """The headers of the task that has a run of its own on the link."""
    return lambda _request: {TASK_TOKEN_HEADER: token}


def as_executor(secret: bytes) -> Sign:
    """The headers of the one process that may take tasks: it shares a secret with the link."""
    derived = derive_auth_secret(secret)
    return lambda request: create_superexec_auth_metadata(
        auth_secret=derived, method=_ACQUIRE, request=request
    )
