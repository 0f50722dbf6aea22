"""The `lm` command: parsing, errors, exit codes and signals. Its verbs are the files of `lm.commands`."""

import gc
import logging
import os
import signal
import sys

from lm.errors import (
    EXIT_CODES,
    EXPECTED,
    BrokenPackageError,
    ConfigError,
    LmError,
    Preempted,
    exit_code_of,
    is_out_of_memory,
)
from lm.output import OutputError, lasting, prepare_streams, quiet_libtpu
from lm.secrets import hide_secrets, redact
from lm.signals import end_on_signals, end_plainly, end_process, handle_signals, print_stacks_on_signal

IS_PROGRAM = __name__ == '__main__' or any(os.path.basename(word) == 'lm' for word in sys.orig_argv[:2])
if IS_PROGRAM:
    # Only the program does this, not its workers or programs that import this module; and before anything slow.
    end_on_signals('lm')
    print_stacks_on_signal()
    prepare_streams()
    quiet_libtpu()
    # Warnings are plain lines. Otherwise the first library that logs by absl, as Orbax does, gives them another form.
    handler = logging.lastResort or logging.StreamHandler()
    handler.addFilter(hide_secrets)
    logging.getLogger().addHandler(handler)
    # Imported modules stay: looking for garbage in them would take a sixth of the time until a verb begins (`run`).
    gc.disable()

# isort: split

import argparse
import contextlib
import dataclasses
import difflib
import re
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from lm import __version__
from lm.commands import find_verbs
from lm.commands.flags import add_parser
from lm.commands.verb import Verb
from lm.text import make_visible

VERBS = find_verbs()
OTHER_CODES = 'exit codes: lm --help'


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        example = re.match(r'example:\n\s*(.+)', self.epilog or '')
        if example and message.startswith('the following arguments are required'):
            message += f', for example: {example[1]}'
        with lasting(self.prog):
            self.exit(ConfigError.exit_code, f'{self.prog}: error: {message}; see {self.prog} --help\n')

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help or the version; argparse would hide that it finds no room."""
        if file is not sys.stdout:
            return super()._print_message(message, file)
        with lasting(self.prog, ends=True):
            print(message, end='', flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = _Parser(
        prog='lm',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description='Pre-trains language models on TPUs, GPUs and laptops, with attention that a gin file selects.',
        epilog=f'`lm VERB --help` shows the flags of a verb and an example.\n\n{EXIT_CODES}',
    )
    parser.add_argument('--version', action='version', version=f'lm {__version__}')
    verbs = parser.add_subparsers(dest='verb', metavar='VERB', required=True, title='verbs', parser_class=_Parser)
    for name, verb in VERBS.items():
        verb.add_flags(add_parser(verbs, name, verb.help, verb.example, f'\n\n{OTHER_CODES}{verb.exit_codes}'))
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments; mistakes exit with code 2, one line and the nearest word that exists."""
    parser = make_parser()
    if argv and not argv[0].startswith('-') and argv[0] not in VERBS:
        parser.error(f'there is no verb {argv[0]!r}{_nearest(argv[0], VERBS) or ": " + ", ".join(VERBS)}')
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in arguments.parser._actions for flag in action.option_strings]
        arguments.parser.error(f'unknown argument {unknown[0]!r}{_explain(unknown, flags)}')
    return arguments


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), 1)
    return f', did you mean {close[0]}?' if close else ''


def _explain(unknown: Sequence[str], flags: Collection[str]) -> str:
    """Returns a hint for unknown words: a flag of that name, or the setting that a word such as '--lr' may mean."""
    word, _, value = unknown[0].partition('=')
    name, names = word.strip('-'), {flag.strip('-'): flag for flag in flags}
    fields = _suggest_fields(name) if '--set' in flags and word.startswith('--') else []
    close = difflib.get_close_matches(name, names, 1)
    if close and not (fields and fields[0].endswith(f'.{name}')):
        return f', did you mean {names[close[0]]}?'
    if '--set' not in flags or not word.startswith('--'):
        return ''
    value = value or next((text for text in unknown[1:2] if not text.startswith('--')), 'VALUE')
    meant = ' or '.join(f'--set {field}={value}' for field in fields[:3]) or '--set SECTION.FIELD=VALUE'
    return f', which is no flag; set a field of the configuration by {meant}'


def _suggest_fields(name: str) -> list[str]:
    """Returns the fields that a word after -- may mean; a word with a dot is a field."""
    if '.' in name:
        return [name]
    from lm.config.setting import suggest_fields
    from lm.experiment import Experiment

    return suggest_fields(name, [field.name for field in dataclasses.fields(Experiment)])


def run(arguments: argparse.Namespace) -> int:
    """Resolves the configuration and runs the verb."""
    verb = VERBS[arguments.verb]
    call = verb.make_call(arguments)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    # Not while libraries are imported: a KeyboardInterrupt inside an import may look like a failed import.
    with contextlib.nullcontext() if verb.resumes else handle_signals(end_plainly):
        code = call() or 0
    sys.stdout.flush()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:
        return int(end.code or 0)
    except OutputError as error:
        print(f'lm: error: {error}', file=sys.stderr)
        return exit_code_of(error)
    verb, label = VERBS[arguments.verb], f'lm {arguments.verb}'
    with lasting(label, ends=verb.only_prints):
        return _exit_code(verb, label, arguments)


def _exit_code(verb: Verb, label: str, arguments: argparse.Namespace) -> int:
    try:
        # This covers the first import, too; a training has its own handlers while it has something to save.
        with handle_signals(lambda: end_on_signals(label)) if verb.resumes else contextlib.nullcontext():
            return run(arguments)
    except KeyboardInterrupt:
        message, code = f'{label}: interrupted', 128 + signal.SIGINT
        if IS_PROGRAM:  # the interpreter would tear down what XLA still computes, and crash (SIGSEGV)
            end_process(message, code)
        print(message, file=sys.stderr)
        return code
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        if not isinstance(error, EXPECTED):
            error = BrokenPackageError.find(error) or error
        expected = isinstance(error, (*EXPECTED, OutputError))
        if is_out_of_memory(error):
            error = LmError(
                f'there is not enough memory ({str(error).splitlines()[0][:200]}); lower the batch '
                '(train.tokens_per_step, or more train.microbatches; evaluate.batch_size), or use more devices'
            )
            expected = True
        # Text of files and names of folders may be a part of it.
        message = redact(make_visible(' '.join(str(error).split('\n')).strip()))
        message = message if expected else f'{type(error).__name__}: {message[:500]}'
        remedy = '' if expected or arguments.debug else ' (run it again with --debug for the traceback)'
        kind = '' if isinstance(error, Preempted) else 'error: '
        print(f'{label}: {kind}{message}{remedy}', file=sys.stderr)
        return exit_code_of(error)


if __name__ == '__main__':
    sys.exit(main())
