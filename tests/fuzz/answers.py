"""Changes messages of a federation so that none of them can be what it says."""

import json
import random
from typing import Any

from coterie.engines.codec import LENGTH

WORDS: tuple[Any, ...] = (
    *(None, True, -1, 10**400, 0.5, "", "x", "0" * 64, "\ud800", [], {}, [[]], {"()": "x"}),
    *({"()": [0] * 50}, {"coterie.core.tree.Bank": [0, 0, 0]}, {"os.system": []}, 10**19),
)


def mutated(data: bytes, draws: random.Random) -> bytes:
    """The message with its header's structure, its bytes or its length changed."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    how = draws.randrange(6)
    if how == 0:
        return data[: draws.randrange(len(data))]
    if how == 1:
        return draws.randbytes(draws.randrange(1, 60)) + data
    if how == 2:  # a byte of the length, or of the header's punctuation
        at = draws.randrange(LENGTH)
        return data[:at] + bytes([data[at] ^ (1 << draws.randrange(8))]) + data[at + 1 :]
    if how == 3:
        depth = draws.choice([50, 5_000, 300_000])
        text = b'{"head":{},"body":' + b'{"()":[' * depth + b"]}" * depth + b"}"
        return len(text).to_bytes(LENGTH, "little") + text + data[end:]
    header = json.loads(data[LENGTH:end])
    if how == 4:
        header["body"] = draws.choice(WORDS)
    else:
        head = header["head"]
        key = draws.choice([k for k in ("round", "client", "state", "digest") if k in head])
        head[key] = draws.choice([word for word in WORDS if word not in ("0" * 64, head[key])])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(LENGTH, "little") + text + data[end:]
