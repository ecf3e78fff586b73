"""Asks all sites the same, outside of rounds, and reads what they answer."""

from collections.abc import Sequence
from typing import TypeVar

from ..core.paired_tests import SiteGain
from ..engines.remote import SETUP, Transport
from ..errors import CoterieError, EngineError
from .protocol import gain_of, payload_of, refused_by

Payload = TypeVar("Payload")


def gain_answered(answer: bytes | str, seeds: int) -> SiteGain:
    """A site's gain; one that says nothing if the site is lost or its answer cannot be read."""
    nothing = SiteGain((None,) * seeds, None)
    if isinstance(answer, str) or refused_by(answer) is not None:
        return nothing
    try:
        found = gain_of(answer)
    except CoterieError:
        return nothing
    return found if len(found.each) == seeds else nothing


def answers_of_all(transport: Transport, clients: Sequence[str], message: bytes) -> list[bytes]:
    """Ask every site the same before a run; all of them have to do what they are asked."""
    answers = transport.ask(dict.fromkeys(clients, message), SETUP)
    found: list[bytes] = []
    wrong = []
    for name in clients:
        answer = answers.get(name, "lost")
        refused = None if isinstance(answer, str) else refused_by(answer)
        if isinstance(answer, str):
            wrong.append(f"'{name}' did not answer ({answer})")
        elif refused is not None:
            wrong.append(f"'{name}' refused: {refused[1] or refused[0]}")
        else:
            found.append(answer)
    if wrong:
        raise EngineError(
            f"not every site takes part: {'; '.join(wrong)}; expected an answer of each; start the "
            "sites ('coterie site start'), or revoke those that left ('coterie deploy revoke')"
        )
    return found


def ask_all(
    transport: Transport, clients: Sequence[str], message: bytes, kind: type[Payload]
) -> dict[str, Payload]:
    """What every site answers, by name; an answer of another kind is refused."""
    answers = answers_of_all(transport, clients, message)
    found: dict[str, Payload] = {}
    for name, answer in zip(clients, answers, strict=True):
        try:
            found[name] = payload_of(answer, kind)
        except CoterieError as error:
            raise EngineError(f"site '{name}' sent what cannot be read: {error}") from error
    return found
