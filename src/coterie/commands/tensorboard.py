"""``--tensorboard DIR``: writes the scores and bytes of every round for TensorBoard."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..experiment.runner import Progress, Watch


@contextlib.contextmanager
def also_to_tensorboard(folder: Path | None, watch: Watch) -> Iterator[Watch]:
    """A watcher that also writes events below ``folder``, in one folder per method and seed.

    The tags are ``score`` (mean over clients) and ``bytes`` (of the round's training). Without a
    folder, the watcher as it is.
    """
    if folder is None:
        yield watch
        return
    make, writers = _writer(), dict[Path, Any]()

    def both(step: Progress) -> None:
        watch(step)
        if step.more > 1 or step.reused:  # rounds of an earlier call, which wrote them
            return
        place = folder / step.method / f"seed-{step.seed}"
        if place not in writers:
            writers[place] = make(log_dir=str(place))
        writers[place].add_scalar("bytes", step.sent, step.done)
        if step.score is not None:
            writers[place].add_scalar("score", step.score, step.done)

    try:
        yield both
    finally:
        for writer in writers.values():
            writer.close()


def _writer() -> Any:
    """The class of TensorBoard's writers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard: tensorboard is not installed; install it with "
            "'pip install coterie[tensorboard]', or leave the option out"
        ) from error
    return SummaryWriter
