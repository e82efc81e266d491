"""A progress bar that shows on a terminal only: rich's where it is installed, a plain one elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Silent:
    """What everything that is not a terminal sees: the lines alone."""

    def advance(self, status: str) -> None:
        """One step is done; `status` stands beside the bar."""

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        print(line, flush=True)


class PlainBar(Silent):
    def __init__(self, total: int, title: str) -> None:
        self.total, self.title, self.done = total, title, 0

    def advance(self, status: str, width: int = 30) -> None:
        self.done += 1
        filled = width * self.done // self.total
        bar = "#" * filled + "." * (width - filled)
        print(f"\r{self.title} [{bar}] {self.done}/{self.total} {status}\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        super().say(line)


@contextmanager
def progress_bar(total: int, title: str) -> Iterator[Silent]:
    """A bar of `total` steps on stderr, for as long as the block runs."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        bar = PlainBar(total, title)
        yield bar
        print(file=sys.stderr)
        return

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeRemainingColumn(), TextColumn("{task.fields[status]}"))  # fmt: skip
    # rich would send stdout to the bar's console, stderr: right on a terminal, wrong for a file.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as rich:
        task = rich.add_task(title, total=total, status="")

        class RichBar(Silent):
            def advance(self, status: str) -> None:
                rich.update(task, advance=1, status=status)

        yield RichBar()
