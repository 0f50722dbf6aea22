"""The results that tests of the battery return: tries per fault, losses, and times to recover."""

import concurrent.futures
import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator

from workshop import Failed, Session


@dataclasses.dataclass
class Tally:
    """The row of a fault.

    `lost` holds the repeated steps of each restart, and `seconds` the time from each restart to its first step.
    `why_not` is the reason if the fault was not run.
    """

    fault: str
    tries: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    lost: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    why_not: str | None = None

    @contextlib.contextmanager
    def attempt(self, name: object, count: int = 1) -> Iterator[None]:
        """Counts a try; its block survives the fault or raises."""
        self.tries += count
        try:
            yield
        except Failed as failure:
            self.failures.append(f'{name}: {failure}')
        except Exception:
            self.failures.append(f'{name}: {traceback.format_exc()}')

    def recovered(self, session: Session, newest: int = 0) -> None:
        """Notes a restart; the run had logged the step `newest` before."""
        first = session.first('step ')
        if first is not None:
            self.seconds.append(first)
        self.lost.append(max(0, newest - (session.resumed_from() or 0)))

    @property
    def survived(self) -> int:
        return self.tries - len(self.failures)

    def cells(self) -> list[str]:
        if self.why_not:
            return [self.fault, 'not run', '', '', self.why_not]
        lost = f'{sum(self.lost) / len(self.lost):.1f} / {max(self.lost)}' if self.lost else '-'
        seconds = f'{sum(self.seconds) / len(self.seconds):.1f} / {max(self.seconds):.1f}' if self.seconds else '-'
        return [self.fault, str(self.tries), str(self.survived), lost, seconds]


def table(rows: Iterable[Tally]) -> str:
    """Returns the table for people: mean and largest of the losses."""
    heads = ['fault', 'tries', 'survived', 'steps lost (mean / most)', 'seconds to recover (mean / most)']
    lines = [heads, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    text = ['  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return '\n'.join([text[0], '-' * len(text[0]), *text[1:]])


def side_by_side(work: Callable, items: Iterable, workers: int = 2) -> list:
    """Runs `work` on each item, a few at the same time."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))
