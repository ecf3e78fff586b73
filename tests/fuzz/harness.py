"""What no try may do, whatever it is fed: end in a traceback, hang, or write outside its folder.

A *try* is one random hostile input given to one part of coterie. It ends in one of two ways: the
input is accepted, or it is refused by a CoterieError, whose message is one readable text. Anything
else is a :class:`Finding`: another exception, a hang, a file outside the try's own folder that
changed, a message with control characters in it.
"""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from coterie.errors import CoterieError

SECONDS = 30  # a try that takes longer hangs

Attack = Callable[[Random, Path], None]


class Finding(AssertionError):  # noqa: N818  what a fuzzer reports
    """A try that ended as none may."""


class Outcome(NamedTuple):
    """How a try ended."""

    refused: bool
    text: str  # the message of the refusal


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Interrupt what takes too long."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(attack: Attack, seed: int, home: Path) -> Outcome:
    """One try in ``home / inside``; what lies beside that folder must stay as it is."""
    inside, canary = home / "inside", home / "canary"
    inside.mkdir(parents=True, exist_ok=True)
    canary.mkdir(exist_ok=True)
    (canary / "precious").write_text("precious")
    try:
        with limited():
            attack(Random(seed), inside)
        outcome = Outcome(False, "")
    except CoterieError as error:
        outcome = Outcome(True, str(error))
    except Exception as error:
        raise Finding(f"seed {seed}: {traceback.format_exc()}") from error
    _check_message(outcome.text, seed)
    if sorted(p.name for p in home.iterdir()) != ["canary", "inside"]:
        raise Finding(f"seed {seed}: wrote beside its folder: {sorted(home.iterdir())}")
    if [p.read_text() for p in canary.iterdir()] != ["precious"]:
        raise Finding(f"seed {seed}: changed a file outside its folder")
    return outcome


def _check_message(text: str, seed: int) -> None:
    bad = [c for c in text if (ord(c) < 32 and c not in "\n\t") or ord(c) == 127]
    if bad:
        raise Finding(f"seed {seed}: control characters {bad!r} in the message {text!r}")
    if len(text) > 4000:
        raise Finding(f"seed {seed}: a message of {len(text)} characters: {text[:200]!r} …")


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**9, -(10**9), 2**63, 10**30),
    *(0.0, 0.5, 1.0, -0.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "auto", "none", "a", "x" * 300, "\x00", "\x1b[31m", "../../etc", "=1+1", "ä" * 40, "🙂"),
    *("os:system", "subprocess:getoutput", "nn:Module", ":", "a:b:c", "cuda:99999999999", "cuda"),
    *([], [1], [0], [-1, 5], ["a"], [[]], [None], {}, {"a": 1}, {"name": "mlp"}, [1] * 50),
)


def strange(random: Random) -> Any:
    """A value that nobody asked for."""
    if random.random() < 0.05:
        value: Any = 1
        for _ in range(random.choice([3, 30, 600])):
            value = [value] if random.random() < 0.5 else {"a": value}
        return value
    return random.choice(STRANGE)


def damaged(random: Random, content: bytes) -> bytes:
    """Bytes with a few flipped, cut out, repeated or put in."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5, 20])):
        at = random.randrange(len(data) + 1)
        how = random.randrange(5)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        elif how == 1:
            del data[at : at + random.choice([1, 10, 1000])]
        elif how == 2:
            data[at:at] = data[at : at + random.choice([1, 50])]
        elif how == 3:
            data[at:at] = random.choice([b"\x00", b"\xff\xfe", b'"', b"\n", b",", b"1e400", b"NaN"])
        else:
            del data[at:]
    return bytes(data)
