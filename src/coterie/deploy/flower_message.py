"""Bytes as one Flower message: a RecordDict of ConfigRecords, each with one piece of the bytes.

Flower keeps every record as an object under its sha256 and transfers objects one by one, so that
no call carries a whole large body. A message names its objects in a tree: Message, RecordDict,
ConfigRecords. A tree of another form is refused before any of its objects is fetched.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import CoterieError
from .flower_api import (
    SUPERLINK_NODE_ID,
    ConfigRecord,
    DecodeError,
    FlowerMessage,
    MessageProto,
    Metadata,
    ObjectTree,
    PullObjectResponse,
    RecordDict,
    get_all_nested_objects,
    get_object_tree,
    make_message,
    message_to_proto,
    no_object_id_recompute,
    now,
    remove_content_from_message,
)

KIND = "query.coterie"  # the message type of a request and of its answer
PIECE = 4 * 2**20  # bytes of one record
FIELD, TOKEN = "bytes", "token"  # the fields of a record
_UPLOAD = 60.0  # seconds in which a sender must upload the next object of its message

Pull = Callable[[str], PullObjectResponse]


class UnreadableError(CoterieError):
    """A message that is not as coterie sends it, or is too large."""


class FlowerParts(NamedTuple):
    """A message as Flower transfers it: its metadata, the tree of its objects, their contents."""

    proto: MessageProto
    tree: ObjectTree
    objects: dict[str, bytes]  # parts before what they are part of

    @property
    def id(self) -> str:
        """The message's id, by which its answer is found."""
        return self.tree.object_id

    def order(self, wanted: Iterable[str]) -> list[str]:
        """The objects to upload, the message itself first.

        A receiver has the message deleted as soon as it has the records, so that what is uploaded
        after them would be refused.
        """
        missing = set(wanted)
        return [key for key in reversed(self.objects) if key in missing]


def packed(body: bytes, token: str) -> RecordDict:
    """The bytes as records ``0``, ``1``, ... of at most PIECE bytes each.

    The token is in every record, so that no two messages have an object in common: the link may
    delete an object that two messages share while the second is uploaded.
    """
    view = memoryview(body)
    count = max(1, math.ceil(len(body) / PIECE))
    pieces = (bytes(view[i * PIECE : (i + 1) * PIECE]) for i in range(count))
    return RecordDict(
        {
            str(i): ConfigRecord({FIELD: piece, TOKEN: f"{token}-{i}"})
            for i, piece in enumerate(pieces)
        }
    )


def request(body: bytes, run: int, node: int, token: str, seconds: float) -> FlowerMessage:
    """A request for one node. Only the node that receives it learns the token."""
    metadata = Metadata(
        run_id=run,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=node,
        reply_to_message_id="",
        group_id=token,
        created_at=now().timestamp(),
        ttl=seconds,
        message_type=KIND,
    )
    return make_message(metadata=metadata, content=packed(body, token))


def parts(message: FlowerMessage) -> FlowerParts:
    """What has to be sent of a message; each object is encoded once."""
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        tree = get_object_tree(message)
    return FlowerParts(message_to_proto(remove_content_from_message(message)), tree, objects)


def unpacked(tree: ObjectTree, token: str, pull: Pull, limit: int) -> bytes:
    """The bytes of a message, whose objects are fetched with ``pull``; at most ``limit`` of them.

    Refuses every other form: other trees, other types of objects, other fields, another token,
    contents that do not have the sha256 by which they were asked for.
    """
    records = _screened(tree, limit)
    try:
        children = {key: ConfigRecord.inflate(_fetched(key, pull)) for key in records}
        held = RecordDict.inflate(_fetched(tree.children[0].object_id, pull), dict(children))
        return _joined(held, token, limit)
    except (ValueError, TypeError, KeyError, DecodeError) as error:
        raise UnreadableError(f"found a message that cannot be decoded ({error})") from None


def _screened(tree: ObjectTree, limit: int) -> list[str]:
    """The ids of a message's records, if the message has the right form and size."""
    if len(tree.children) != 1:
        raise UnreadableError(f"found a message of {len(tree.children)} parts; expected one")
    found = tree.children[0].children
    most = max(1, math.ceil(limit / PIECE))
    if not 1 <= len(found) <= most:
        raise UnreadableError(
            f"found a message of {len(found)} records; expected 1 to {most} of {PIECE} bytes, "
            "which is the limit of this federation"
        )
    if any(each.children for each in found):
        raise UnreadableError("found a record with parts of its own; expected plain records")
    return [each.object_id for each in found]


def _fetched(key: str, pull: Pull) -> bytes:
    """One object's content; waits while its sender uploads it."""
    end, wait = time.monotonic() + _UPLOAD, 0.02
    while True:
        found = pull(key)
        if found.object_available:
            break
        if not found.object_found or time.monotonic() > end:
            raise UnreadableError("found a message without its content; its sender has gone")
        time.sleep(wait)
        wait = min(2 * wait, 0.5)
    if hashlib.sha256(found.object_content).hexdigest() != key:
        raise UnreadableError("found an object whose content does not have its sha256")
    return found.object_content


def _joined(held: RecordDict, token: str, limit: int) -> bytes:
    pieces = []
    for i in range(len(held)):
        record = held[str(i)]
        if not isinstance(record, ConfigRecord) or record.keys() != {FIELD, TOKEN}:
            raise ValueError(f"expected the fields {FIELD} and {TOKEN} in record {i}")
        piece = record[FIELD]
        if not isinstance(piece, bytes) or record[TOKEN] != f"{token}-{i}":
            raise ValueError(f"expected bytes with the token of the message in record {i}")
        pieces.append(piece)
    if sum(map(len, pieces)) > limit:
        raise ValueError(f"expected at most {limit} bytes")
    return b"".join(pieces)
