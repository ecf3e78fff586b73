"""The long-running programs of a federation: its coordinator, and a site's agent."""

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..engines.site import ANSWERS, REPLY, STATES
from ..errors import ConfigError, CoterieError, printable
from ..runs.config.schema import Config
from ..storage import files
from .folders import FederationFolder
from .handler import AGREEMENT, WITHDRAWN, SiteHandler
from .holdings import Holdings
from .peers.joining import JoinedResult, JoiningSite
from .peers.sealing import PeerIdentity
from .peers.talk import PEERS, PREPARED, STATE, HttpLink
from .sent_log import logs_of
from .site_folder import SiteFolder
from .transports import end_of

UPDATES = ("local", "model", "change")  # kinds of messages that hold what a site has learnt


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; log lines go to stderr meanwhile."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    for noisy in ("httpx", "httpcore", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_coordinator(folder: FederationFolder) -> None:
    """Carry messages between the operator and the sites until a signal ends it."""
    with stopping() as stop:
        for line in folder.warnings():
            logging.getLogger(__name__).warning("%s", line)
        end_of(folder.transport, "coordinate")(folder, stop)


def holdings_of(folder: SiteFolder, data: str | None, target: str | None) -> Holdings:
    """The data of a site: as ``site.toml`` says, unless the command names another file."""
    name, options = data or folder.data.name, dict(folder.data.options)
    if target is not None:
        options["target"] = target
    if name is None:
        raise ConfigError(
            f"{folder.path / 'site.toml'}: [data] has no name; expected this site's own file or "
            "folder of data; name it there, or with --data"
        )
    return Holdings(folder, name, options)


def texts_told(holdings: Holdings) -> list[str]:
    """One line for each column whose texts leave and that [levels] does not decide about."""
    return [
        f"{name}: " + ", ".join(f"{text} ({rows})" for text, rows in texts.items())
        for name, texts in holdings.unnamed_texts().items()
    ] or ["none"]


def site_facts(folder: SiteFolder, holdings: Holdings) -> list[tuple[str, str]]:
    """What a site should know of its data before it takes part: rows, inputs, classes, gaps."""
    schema = holdings.schema
    inputs = ", ".join(column.name for column in schema.columns) or f"shape {list(schema.shape)}"
    gaps = [column.name for column in schema.columns if column.missing]
    facts = [
        ("site", f"{folder.name} of '{folder.federation}', coordinator {folder.address}"),
        ("inputs", inputs),
        ("missing cells", ", ".join(gaps) or "none"),
    ]
    try:
        found = holdings.facts(schema, "auto", classes=True)
    except CoterieError as error:  # what one site alone lacks, others may have
        return [*facts, ("note", f"alone it could not be trained: {error}")]
    counts = found.counts
    facts.append(("samples", f"{counts.train} train, {counts.val} validation, {counts.test} test"))
    if found.classes:
        pairs = zip(schema.target.classes, found.classes, strict=True)
        facts.append(("classes", ", ".join(f"{name}: {count}" for name, count in pairs)))
    if found.weak is not None:
        facts.append(("warning", f"{found.weak}: this site's own answer will be 'cannot tell'"))
    elif counts.test < 30:
        facts.append(("warning", f"{counts.test} test samples can hardly tell a gain"))
    return facts


def join_peers(
    folder: SiteFolder, holdings: Holdings, identity: PeerIdentity, config: Config | None
) -> JoinedResult:
    """Take part in an experiment among peers, until its end or until a signal ends it."""
    if folder.transport != "direct":
        raise ConfigError(
            f"{folder.path / 'site.toml'}: found the transport '{folder.transport}'; expected "
            "'direct': its coordinator has the relay of the peers"
        )

    said = ""

    def note(line: str) -> None:
        nonlocal said
        if line != said:  # a relay that is away is told once
            logging.getLogger(__name__).info("%s", printable(line))
        said = line

    with stopping() as stop, contextlib.closing(HttpLink.dial(folder, note, stop)) as link:
        return JoiningSite(folder, holdings, identity, link, note).run(config)


def run_site(folder: SiteFolder, holdings: Holdings) -> None:
    """Answer the coordinator until a signal ends it."""
    if (folder.path / WITHDRAWN).exists():
        raise ConfigError(
            f"{folder.path}: this site has withdrawn from the federation; make a new folder with "
            "'coterie site init' to join again"
        )
    handler = _Bounded(SiteHandler(folder, holdings), folder.limits.seconds)
    with stopping() as stop:
        logging.getLogger(__name__).info("site '%s' dials %s", folder.name, folder.address)
        end_of(folder.transport, "serve")(folder, handler, stop)


class _Bounded:
    """Ends the process when a message takes longer than the site's owner allows.

    States are whole files, so that nothing is lost; a supervisor (systemd) starts the site again.
    """

    def __init__(self, handler: SiteHandler, seconds: float) -> None:
        self._handler, self._seconds = handler, seconds

    def answer(self, data: bytes) -> bytes:
        """The answer, within the limit."""
        clock = threading.Timer(self._seconds, self._end)
        clock.daemon = True
        clock.start()
        try:
            return self._handler.answer(data)
        finally:
            clock.cancel()

    def _end(self) -> None:
        logging.getLogger(__name__).error(
            "a message took longer than %s seconds ([limits] seconds); the site ends",
            self._seconds,
        )
        os._exit(os.EX_TEMPFAIL)


def withdraw(folder: SiteFolder) -> list[str]:
    """End a site's part: mark it as withdrawn and delete its states; says what stays outside."""
    told = [
        f"experiment {name[:12]}: {rounds} rounds of this site's updates were sent; what was "
        "averaged into the models of others stays in them"
        for name, rounds in sorted(_rounds_sent(folder).items())
    ]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    files.write_json(folder.path / WITHDRAWN, {"withdrawn": when})
    for place in folder.experiments.glob(f"*/{AGREEMENT}"):
        _forget(place.parent)
    return [*told, "this site's states are deleted; its own final models and its log are kept"]


def _forget(folder: Path) -> None:
    """Delete the states of an experiment, and what would be needed to go on with it."""
    for path in (folder / STATES).glob("*.bin"):
        path.unlink(missing_ok=True)
    for name in (REPLY, ANSWERS, f"{PEERS}/{STATE}", f"{PEERS}/{PREPARED}"):
        (folder / name).unlink(missing_ok=True)


def _rounds_sent(folder: SiteFolder) -> dict[str, int]:
    """The number of rounds of each experiment in which the site sent an update."""
    found: dict[str, set[Any]] = {}
    logs = (path.read_text(encoding="utf-8") for path in logs_of(folder))
    for text in itertools.chain.from_iterable(map(str.splitlines, logs)):
        with contextlib.suppress(ValueError, AttributeError):
            line = json.loads(text)
            if line.get("kind") in UPDATES:
                found.setdefault(str(line.get("experiment")), set()).add(line.get("round"))
    return {name: len(rounds) for name, rounds in found.items()}
