"""What a site does: answers the coordinator, shows its data, withdraws."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ..data.manifest import class_counts
from ..engines.site import ANSWERS, REPLY, STATES
from ..errors import ConfigError, CoterieError
from ..storage import files, lock
from . import site_socket
from .handler import AGREEMENT, WITHDRAWN, SiteHandler
from .holdings import Holdings
from .service import Measure, monitored, stopping
from .site_folder import SiteFolder
from .site_report import left

SHARE = 0.8  # of the machine's memory, that a site may use
UPDATES = ("local", "peer")  # kinds of messages that hold what a site has learnt


def holdings_of(folder: SiteFolder, data: str | None = None, target: str | None = None) -> Holdings:
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
        found = holdings.facts(schema, "auto")
    except CoterieError as error:  # what one site alone lacks, others may have
        return [*facts, ("note", f"alone it could not be trained: {error}")]
    counts = found.counts
    facts.append(("samples", f"{counts.train} train, {counts.val} validation, {counts.test} test"))
    if schema.target.classes:
        held = holdings.federation(schema, "auto")
        of_each = class_counts(held, held.train, held.val, held.test)[0].tolist()
        pairs = zip(schema.target.classes, of_each, strict=True)
        facts.append(("classes", ", ".join(f"{name}: {count}" for name, count in pairs)))
    if found.weak is not None:
        facts.append(("warning", f"{found.weak}: this site's own answer may be 'cannot tell'"))
    elif counts.test < 30:
        facts.append(("warning", f"{counts.test} test samples can hardly tell a gain"))
    return facts


def run_site(
    folder: SiteFolder,
    holdings: Holdings,
    socket: Path | None,
    monitor: str | None = None,
    json_lines: bool = False,
) -> None:
    """Answer the coordinator, or whoever writes to a unix socket, until a signal ends it."""
    if (folder.path / WITHDRAWN).exists():
        raise ConfigError(
            f"{folder.path}: this site has withdrawn from the federation; make a new folder with "
            "'coterie site init' to join again"
        )
    _leave_memory()
    with (
        lock.held(folder.path),
        stopping(json_lines=json_lines) as stop,
        contextlib.ExitStack() as scope,
    ):
        handler = _Watched(SiteHandler(folder, holdings), folder.limits.seconds)
        scope.enter_context(monitored(monitor, stop, handler.measures))
        if socket is not None:
            site_socket.serve(folder, socket, handler, stop)
            return
        from .direct import serve  # needs an extra that Flower's side does not

        logging.getLogger(__name__).info("site '%s' dials %s", folder.name, folder.address)
        serve(folder, handler, stop)


def _leave_memory() -> None:
    """Let no message take the whole machine's memory: what needs more fails, and is a refusal."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        most, hard = int(SHARE * whole), resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


class _Watched:
    """Counts a site's answers, and ends the process when one takes longer than its owner allows.

    States are whole files, so that nothing is lost; a supervisor (systemd) starts the site again.
    """

    def __init__(self, handler: SiteHandler, seconds: float) -> None:
        self._handler, self._limit = handler, seconds
        self._answers = self._bytes = 0
        self._seconds = 0.0

    def answer(self, data: bytes) -> bytes:
        """The answer, within the limit."""
        clock, begun = threading.Timer(self._limit, self._end), time.monotonic()
        clock.daemon = True
        clock.start()
        try:
            reply = self._handler.answer(data)
        finally:
            clock.cancel()
        self._answers += 1
        self._bytes += len(reply)
        self._seconds += time.monotonic() - begun
        return reply

    def largest(self) -> int:
        """Bytes of the largest message that may arrive now."""
        return self._handler.largest()

    def measures(self) -> Iterator[Measure]:
        """What Prometheus may know."""
        for name, said, value in (
            ("coterie_answers", "Answers of this site", self._answers),
            ("coterie_answer_bytes", "Bytes of its answers", self._bytes),
            ("coterie_answer_seconds", "Seconds that they took", self._seconds),
        ):
            yield Measure(name, "counter", said, {}, value)

    def _end(self) -> None:
        logging.getLogger(__name__).error(
            "a message took longer than %s seconds ([limits] seconds); the site ends",
            self._limit,
        )
        os._exit(os.EX_TEMPFAIL)


def withdraw(folder: SiteFolder) -> list[str]:
    """End a site's part: mark it as withdrawn and delete its states; says what stays outside."""
    told = [
        f"experiment {name[:12]}: {len(found.rounds)} rounds of this site's updates were sent; "
        "what was averaged into the models of others stays in them"
        for (name, kind), found in sorted(left(folder.sent).items())
        if kind in UPDATES
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
    for name in (REPLY, ANSWERS):
        (folder / name).unlink(missing_ok=True)
