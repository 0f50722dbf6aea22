"""A file of comma-separated values, for spreadsheets."""

import csv
from collections.abc import Mapping

from lm.config.configurable import configurable, field
from lm.trackers.base import RunFacts, Tracker, TrackerWriter


# `train.trackers = [@csv_file()]`. `resume=True`: a run may be resumed with other trackers.
@configurable('csv_file', resume=True)
class CsvFile(Tracker):
    """RUN_DIR/NAME with one line per figure: step, name, value. A resumed run appends to it."""

    file_name: str = field(default='figures.csv', help='name of the file in the run directory')

    def open(self, run: RunFacts) -> TrackerWriter:
        return _CsvWriter(run.path / self.file_name)


# Whatever a writer raises ends the tracker, not the run.
class _CsvWriter(TrackerWriter):
    def __init__(self, path):
        self._file = path.open('a')
        self._writer = csv.writer(self._file)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._writer.writerows((step, name, value) for name, value in numbers.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
