"""The `lm` command.

To add a verb, add an entry to VERBS. Its flags stand in its room, or here where it is a single file. Its
`main(experiment, arguments)` is imported only when the verb runs, so that `lm --help` answers at once, and returns an
exit code or None.
"""

import gc
import logging
import os
import sys

from lm.errors import (
    EXIT_CODES,
    EXPECTED,
    ConfigError,
    Preempted,
    end_on_signals,
    end_plainly,
    exit_code_of,
    signals,
)
from lm.output import lasting, prepare_streams

if __name__ == '__main__' or any(os.path.basename(word) == 'lm' for word in sys.orig_argv[:2]):
    # As the program, not as a module of another one or of its workers; before anything that takes its time.
    end_on_signals('lm')
    prepare_streams()
    # Warnings are plain lines: else the first library that logs by absl, as Orbax does, gives them another form.
    logging.getLogger().addHandler(logging.lastResort)
    # What is imported stays: looking for garbage in it would be a sixth of the time until a verb begins (`run`).
    gc.disable()

# isort: split

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lm import __version__
from lm.bench.command import bench_flags
from lm.check.flags import check_flags, check_together
from lm.config.flags import distributed_flags, gin_flags
from lm.data.prepare.flags import prepare_flags
from lm.evaluation.flags import evaluate_flags
from lm.interop.flags import export_flags, import_flags
from lm.report.flags import report_flags
from lm.summary.flags import inspect_flags
from lm.sweep.flags import sweep_flags

# --------------------------------------------------------------------------------------------------------------- flags


def train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--run_dir',
        required=True,
        metavar='DIR',
        help='the run: a new folder, or one to resume; its name names the run',
    )
    parser.add_argument(
        '--compile_cache', metavar='DIR', help="where compiled programs stay; 'none': nowhere; default: in the run"
    )
    parser.add_argument(
        '--rewind_to',
        type=int,
        metavar='STEP',
        help='go on from this checkpoint, with a lower rate or without some batches; later ones are moved aside',
    )


def branch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--branch_from',
        metavar='RUN',
        help="begin a new run from a checkpoint of another one, with that one's configuration but for what is given "
        'here: optimizer state, step count and position in the data go on',
    )
    parser.add_argument('--step', type=int, metavar='N', help='the checkpoint for --branch_from')


def run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--run_dir', required=True, metavar='DIR', help='a run of lm train')
    parser.add_argument('--step', type=int, metavar='N', help='the checkpoint of this step; default: the newest')


def generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--prompt', help='the beginning of the text; default: none')
    parser.add_argument('--prompt_file', metavar='FILE', help='one prompt a line')
    parser.add_argument('--text_file', metavar='FILE', help='the beginning of the text, of any length: a whole file')
    parser.add_argument(
        '--max_tokens',
        type=int,
        default=256,
        metavar='N',
        help='tokens to add, behind the end of a document too, where the name of its token is shown; default: 256',
    )
    parser.add_argument('--temperature', type=float, default=1.0, metavar='T', help='0 takes the most probable token')
    parser.add_argument('--top_k', type=int, metavar='K', help='only the K most probable tokens')
    parser.add_argument('--top_p', type=float, metavar='P', help='only the most probable tokens that make up P')
    parser.add_argument('--seed', type=int, default=0, help='default: 0')


# ------------------------------------------------------------------------------------------------------ configurations


def from_files(arguments: argparse.Namespace, params: Sequence[str], base: str | None = None) -> Any:
    """--gin_file and --gin_param, on top of `base`."""
    from lm.experiment import load

    return load(arguments.gin_file, params, allow_imports=arguments.allow_gin_imports, base=base)


def for_check(arguments: argparse.Namespace, params: Sequence[str]) -> Any:
    """What `lm train` would make of the same flags, or with --sweep_file the point --index of the sweep; None where
    --if_possible is given and the run that they change is not to be seen from here."""
    check_together(arguments)
    if not arguments.sweep_file:
        from lm.check.base import is_in_reach
        from lm.runs.base import base_of

        return from_files(arguments, params, base=base_of(arguments)) if is_in_reach(arguments) else None
    from lm.sweep.points import make_points

    points = make_points(arguments.gin_file, arguments.sweep_file, params, allow_imports=arguments.allow_gin_imports)
    index = arguments.index or 0
    if not 0 <= index < len(points):
        raise ConfigError(f'--index {index}: must be 0 to {len(points) - 1}')
    return points[index].experiment


def from_new_or_old_run(arguments: argparse.Namespace, params: Sequence[str]) -> Any:
    """--gin_file and --gin_param, on top of what `base_of` finds; checks the name of the run first."""
    from lm.runs.base import base_of, check_start

    check_run_dir(arguments.run_dir)
    check_start(arguments.branch_from, arguments.step, arguments.rewind_to)
    return from_files(arguments, params, base=base_of(arguments))


def from_run(arguments: argparse.Namespace, params: Sequence[str]) -> Any:
    """The configuration of the run, changed by --gin_file and --gin_param."""
    from lm.experiment import load_of_run

    allow_imports = arguments.allow_gin_imports
    return load_of_run(arguments.run_dir, arguments.gin_file, params, allow_imports=allow_imports)


def check_run_dir(path: str) -> None:
    """Raises ConfigError unless the last part of `path` is a good name for a run and no part is `..`."""
    from lm.runs.run_dir import check_name, check_path

    check_path(path)
    check_name(path.rstrip('/').rpartition('/')[2])


# --------------------------------------------------------------------------------------------------------------- verbs


@dataclasses.dataclass(frozen=True)
class Verb:
    """One `lm VERB`.

    Attributes:
        help: one line.
        example: a command that works.
        main: 'module:function', called with (experiment, arguments).
        flags: functions that add arguments to the parser.
        configure: makes the experiment from (arguments, gin parameters); None: the verb gets None.
        bindings: flag → the gin parameter that it sets.
        exit_codes: those that only this verb has.
        resumes: SIGTERM ends it with the code of what may be run again, at any moment.
        only_prints: it ends where nobody reads what it prints; others go on, for their results lie elsewhere.
    """

    help: str
    example: str
    main: str
    flags: tuple[Callable[[argparse.ArgumentParser], None], ...] = (gin_flags,)
    configure: Callable[[argparse.Namespace, Sequence[str]], Any] | None = from_files
    bindings: dict[str, str] = dataclasses.field(default_factory=dict)
    exit_codes: str = ''
    resumes: bool = False
    only_prints: bool = False


VERBS = {
    'prepare': Verb(
        help='turn text into a token store',
        example='lm prepare --gin_file data/quickstart.gin',
        main='lm.data.prepare.command:main',
        flags=(prepare_flags, gin_flags),
        bindings={'strict': 'prepare.strict', 'processes': 'prepare.processes'},
    ),
    'train': Verb(
        help='train a model, or resume a run: the same command does both',
        example='lm train --run_dir runs/tiny --gin_file configs/experiments/quickstart.gin',
        main='lm.session.train:main',
        flags=(train_flags, branch_flags, gin_flags, distributed_flags),
        configure=from_new_or_old_run,
        resumes=True,
    ),
    'evaluate': Verb(
        help='measure the perplexity of a run on a split',
        example='lm evaluate --run_dir runs/tiny --split validation --window sliding:256',
        main='lm.evaluation.command:main',
        flags=(run_flags, evaluate_flags, gin_flags, distributed_flags),
        configure=from_run,
        bindings={
            'split': 'evaluate.split',
            'context_length': 'evaluate.context_length',
            'window': 'evaluate.window',
            'batch_size': 'evaluate.batch_size',
            'chunk': 'evaluate.chunk',
        },
    ),
    'generate': Verb(
        help='continue a text with the weights of a run',
        example="lm generate --run_dir runs/tiny --prompt 'def main(' --max_tokens 200",
        main='lm.generation:main',
        flags=(run_flags, generate_flags, gin_flags, distributed_flags),
        configure=from_run,
        only_prints=True,
    ),
    'export': Verb(
        help='write the weights of a run for other programs',
        example='lm export --run_dir runs/tiny --format huggingface --out exports/tiny',
        main='lm.interop.command:export_run',
        flags=(run_flags, export_flags, gin_flags),
        configure=from_run,
    ),
    'import': Verb(
        help='make a run of a Llama-shaped checkpoint, or of what lm export has written',
        example='lm import checkpoints/llama --run_dir runs/llama',
        main='lm.interop.command:import_run',
        flags=(import_flags, gin_flags),
    ),
    'check': Verb(
        help='show what a run needs before it is paid for: memory, collectives, hours; compiles for TPUs without one',
        example='lm check --gin_file configs/models/small.gin --gin_file configs/recipes/paper.gin --topology v5e:4x8',
        main='lm.check.command:main',
        flags=(check_flags, gin_flags),
        configure=for_check,
    ),
    'sweep': Verb(
        help='train every point of a grid of configurations, or those that are not finished yet',
        example='lm sweep --run_dir runs/sweep --gin_file configs/experiments/quickstart.gin '
        '--sweep_file configs/sweeps/quickstart.gin --dry_run',
        main='lm.sweep.command:main',
        flags=(sweep_flags, gin_flags, distributed_flags),
        configure=None,
        exit_codes='\n  Of a sweep 1 also means that points did not succeed: its table says which and why.',
    ),
    'report': Verb(
        help='turn runs into tables and pictures',
        example="lm report runs/sweep 'runs/tiny*' --out report",
        main='lm.report.command:main',
        flags=(report_flags,),
        configure=None,
    ),
    'bench': Verb(
        help='measure attention, training steps, TPU kernels (without a TPU) and data on this machine',
        example='lm bench attention --mechanisms softmax,polysketch --contexts 1024,4096',
        main='lm.bench.command:main',
        flags=(bench_flags,),
        configure=None,
    ),
    'inspect': Verb(
        help='show what a run, a sweep or a token store holds',
        example='lm inspect runs/tiny --verify',
        main='lm.summary.command:main',
        flags=(inspect_flags,),
        configure=None,
        only_prints=True,
    ),
}


# ---------------------------------------------------------------------------------------------------------------- main


class _Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ConfigError.exit_code, f'{self.prog}: error: {message}; see {self.prog} --help\n')


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog='lm',
        formatter_class=raw,
        allow_abbrev=False,
        description='Pre-trains language models on TPUs, GPUs and laptops, with attention that a gin file selects.',
        epilog=f'`lm VERB --help` shows the flags of a verb and an example.\n\n{EXIT_CODES}',
    )
    parser.add_argument('--version', action='version', version=f'lm {__version__}')
    verbs = parser.add_subparsers(dest='verb', metavar='VERB', required=True, title='verbs', parser_class=_Parser)
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.help,
            description=f'{verb.help[0].upper()}{verb.help[1:]}.',
            epilog=f'example:\n  {verb.example}\n\n{EXIT_CODES}{verb.exit_codes}',
            formatter_class=raw,
            allow_abbrev=False,
        )
        for add in verb.flags:
            add(sub)
        sub.add_argument('--debug', action='store_true', help='show the traceback of an error')
        sub.set_defaults(parser=sub)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; mistakes exit with code 2, one line and the nearest word that exists."""
    parser = make_parser()
    if argv and not argv[0].startswith('-') and argv[0] not in VERBS:
        parser.error(f'there is no verb {argv[0]!r}{_nearest(argv[0], VERBS) or ": " + ", ".join(VERBS)}')
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in arguments.parser._actions for flag in action.option_strings]
        arguments.parser.error(f'unknown argument {unknown[0]!r}{_nearest(unknown[0].partition("=")[0], flags)}')
    return arguments


def _nearest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), 1)
    return f', did you mean {close[0]}?' if close else ''


def run(arguments: argparse.Namespace) -> int:
    """Resolves the configuration and runs the verb."""
    verb = VERBS[arguments.verb]
    experiment = None
    if verb.configure:
        chosen = {param: getattr(arguments, flag) for flag, param in verb.bindings.items()}
        params = [f'{param} = {value!r}' for param, value in chosen.items() if value is not None]
        experiment = verb.configure(arguments, [*arguments.gin_param, *params])
    module, _, name = verb.main.partition(':')
    function = getattr(importlib.import_module(module), name)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    # Not while libraries are imported: a KeyboardInterrupt in there may become a failed import.
    with contextlib.nullcontext() if verb.resumes else signals(end_plainly):
        return function(experiment, arguments) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:
        return end.code or 0
    verb, label = VERBS[arguments.verb], f'lm {arguments.verb}'
    with lasting(label, ends=verb.only_prints):
        return _exit_code(verb, label, arguments)


def _exit_code(verb: Verb, label: str, arguments: argparse.Namespace) -> int:
    try:
        # From the first import on; a training has its own handlers while it has something to save.
        with signals(lambda: end_on_signals(label)) if verb.resumes else contextlib.nullcontext():
            return run(arguments)
    except KeyboardInterrupt:
        print(f'{label}: interrupted', file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        expected = isinstance(error, EXPECTED)
        message = ' '.join(str(error).split('\n')).strip()
        message = message if expected else f'{type(error).__name__}: {message[:500]}'
        remedy = '' if expected or arguments.debug else ' (run it again with --debug for the traceback)'
        kind = '' if isinstance(error, Preempted) else 'error: '
        print(f'{label}: {kind}{message}{remedy}', file=sys.stderr)
        return exit_code_of(error)


if __name__ == '__main__':
    sys.exit(main())
