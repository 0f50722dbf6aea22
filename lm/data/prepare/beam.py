"""`lm prepare --engine beam`: Apache Beam makes the parts of lm.data.prepare.parts, one element per part.

The pipeline has three barriers: the tokenizer, the shards of the source, the pieces of the store. Its elements are
small; all data lie beside the store. So a runner may repeat any element, and may kill any worker.
"""

import functools
import importlib.util
import logging
import re
import shlex
from collections.abc import Callable, Iterator

from rich.console import Console

from lm import errors
from lm.config.configurable import check_kind
from lm.data import store
from lm.data.prepare import stages
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.description import print_summary
from lm.data.prepare.parts import PartedPreparation, delete_parts
from lm.data.prepare.pieces import StorePiece, discarding, make_piece
from lm.data.prepare.shards import Preparation, Unit, tokenize, train_tokenizer
from lm.data.prepare.shared_folder import SharedFolder
from lm.errors import ConfigError, LmError, MissingPackageError
from lm.files import JsonObject

_OURS = re.compile(r'lm\.errors\.(\w+): (.+)')
_REMARK = re.compile(r' \[while running .*', re.DOTALL)


def prepare_with_beam(
    config: PrepareConfig, path: str, flags: str = '', console: Console | None = None
) -> dict[str, object]:
    """Makes the token store `path` with a pipeline of Apache Beam. Returns the contents of dataset.json.

    Args:
        path: the store, in a place that all workers see.
        flags: options of Beam's runner, as on a command line; '': Beam's DirectRunner with worker processes.

    Raises:
        MissingPackageError: apache-beam is not installed.
        LmError: the pipeline has failed; and the errors of `lm.data.prepare.stages.prepare`.
    """
    check_kind('config', config, PrepareConfig, 'such as experiment.prepare')
    if importlib.util.find_spec('apache_beam') is None:
        raise MissingPackageError('--engine beam', 'apache-beam', 'beam')
    console = console or Console(markup=False, emoji=False, highlight=False)
    if (info := stages.find_finished(config, path, console)) is not None:
        return info
    stages.fetch_source(config, path, console)
    work = _begin(config, path)
    stages.print_plan(work, work.units, console)
    try:
        _run(work, flags)
    except Exception as error:
        explained = _explain(error)
        if isinstance(explained, ConfigError) and not work.job.has_tokenizer():
            delete_parts(path)  # such as too large a vocabulary: nothing is done that is worth keeping
        raise explained from error
    if (info := store.read_info(path)) is None:
        raise LmError(f'{path}: the pipeline has ended and has not finished the store; run the same command again')
    delete_parts(path)  # such as what an element that was repeated late has left
    print_summary(config, path, info, console)
    return info


def _begin(config: PrepareConfig, path: str) -> PartedPreparation:
    return PartedPreparation.plan(config, path).begin(1)


def _run(work: PartedPreparation, flags: str) -> None:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    words = shlex.split(flags)
    local: JsonObject = {'direct_num_workers': stages.choose_processes(work.config, len(work.units))}
    local |= {'direct_running_mode': 'multi_processing', 'default_sdk_harness_log_level': 'CRITICAL'}
    options = PipelineOptions(words, **({} if words else local))
    # It prints the traceback of an error several times; the error is raised as well.
    logging.getLogger('apache_beam').setLevel(logging.CRITICAL)
    place, wait, spread = (work.path, work.folder), beam.combiners.Count.Globally, beam.Reshuffle
    # Functions travel to the workers with the pipeline. They hold the settings, and no list of shards.
    begin = functools.partial(_begin, work.config, work.path)
    with beam.Pipeline(options=options) as pipeline:
        tokenizer = pipeline | beam.Create([None]) | 'Tokenizer' >> beam.FlatMap(_guard, *place, _train, begin)
        units = tokenizer | wait() | 'Shards' >> beam.FlatMap(_guard, *place, _list_units, begin) | spread()
        made = units | 'Tokenise' >> beam.FlatMap(_guard, *place, _tokenize, work.job)
        pieces = made | 'Wait' >> wait() | 'Pieces' >> beam.FlatMap(_guard, *place, _list_pieces, begin)
        written = pieces | 'Spread' >> spread() | 'Write' >> beam.FlatMap(_guard, *place, _write, *place)
        _ = written | 'Wait for all' >> wait() | 'Finish' >> beam.FlatMap(_guard, *place, _finish, begin)


def _guard(
    element: object, path: str, folder: SharedFolder, function: Callable, *arguments: object
) -> Iterator[object]:
    """Yields what a function makes of an element. Errors after the store was finished, without its parts, are none."""
    try:
        with discarding(folder):
            yield from function(element, *arguments)
    except Exception:
        if store.read_info(path) is None:
            raise


def _train(_: None, begin: Callable[[], PartedPreparation]) -> Iterator[None]:
    work = begin()
    if not work.job.has_tokenizer():
        train_tokenizer(work.job, work.config.tokenizer, stages.choose_sampled(work.shards))
    work.check_versions()
    yield None


def _list_units(_: int, begin: Callable[[], PartedPreparation]) -> Iterator[Unit]:
    yield from begin().units


def _tokenize(unit: Unit, job: Preparation) -> Iterator[None]:
    tokenize(job, unit)
    yield None


def _list_pieces(_: int, begin: Callable[[], PartedPreparation]) -> Iterator[StorePiece]:
    work = begin()
    yield from work.list_pieces(work.read_counts())


def _write(piece: StorePiece, path: str, folder: SharedFolder) -> Iterator[None]:
    make_piece(folder, path, piece)
    yield None


def _finish(_: int, begin: Callable[[], PartedPreparation]) -> Iterator[None]:
    work = begin()
    counts = work.read_counts()
    work.finish(counts, work.list_pieces(counts))
    yield None


def _explain(error: Exception) -> Exception:
    """Returns the error of this package that made a pipeline fail, or an LmError with Beam's first line."""
    text = _REMARK.sub('', str(error))
    ours = [(type(error).__name__, text)] if isinstance(error, LmError) else _OURS.findall(str(error))
    if ours:
        name, text = ours[-1]
        return getattr(errors, name, LmError)(_REMARK.sub('', text))
    if isinstance(error, OSError | ValueError):  # of the storage: `lm.data.prepare.run` explains them
        return error
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return LmError(f'Beam: {lines[-1][:300]}; mend that and run the same command again: finished shards are kept')
