"""Flags that several verbs share, and the typed values that they become. The module imports nothing heavy."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.experiment import Experiment
    from lm.pod.job import JobAddress
    from lm.sweep.points import Point


def add_parser(
    parsers: argparse._SubParsersAction, name: str, help: str, example: str, ending: str = ''
) -> argparse.ArgumentParser:
    """Adds the parser of a verb, or of a part of one. `ending` stands behind the example."""
    parser = parsers.add_parser(
        name,
        help=help,
        description=f'{help[0].upper()}{help[1:]}.',
        epilog=f'example:\n  {example}{ending}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of an error')
    parser.set_defaults(parser=parser)
    return parser


def add_option_flags(parser: argparse._ActionsContainer, options: type) -> None:
    """Adds a flag for each field with a help text (`lm.options.option`). A flag that is not given is None."""
    types = typing.get_type_hints(options)
    for field in list_options(options):
        settings = {name: value for name, value in field.metadata.items() if value is not None}
        flag = f'--{settings.pop("flag", field.name)}'
        least = settings.pop('least', 1)
        if 'nargs' in settings:
            parser.add_argument(field.name, **settings)
        elif types[field.name] is bool:
            parser.add_argument(flag, dest=field.name, action='store_true', default=None, **settings)
        elif settings.get('action') == 'append':
            parser.add_argument(flag, dest=field.name, **settings)
        else:
            parser.add_argument(flag, dest=field.name, type=_find_parser(types[field.name], least), **settings)


def list_options(options: type) -> list[dataclasses.Field]:
    """Returns the fields of a dataclass that are flags."""
    return [field for field in dataclasses.fields(options) if 'help' in field.metadata]


def find_options(arguments: argparse.Namespace, options: type) -> dict[str, Any]:
    """Returns the flags of `add_option_flags` that are given; the dataclass has the defaults of the others."""
    return find_given(arguments, *(field.name for field in list_options(options)))


def _find_parser(annotation: object, least: int) -> Callable[[str], Any]:
    """Returns the reader of values of this type: an int of at least `least`, a positive float, or text."""
    known = {int: _count(least), float: _number, str: str}
    options = (annotation, *typing.get_args(annotation))  # `X | None` has the parts X and None
    if items := [typing.get_args(option)[0] for option in options if typing.get_origin(option) is Sequence]:
        return _list(known[items[0]])
    return next((known[option] for option in options if option in known), str)


def _list(kind: Callable[[str], Any]) -> Callable[[str], list]:
    def parse(text: str) -> list:
        found = [kind(part.strip()) for part in text.split(',') if part.strip()]
        if not found:
            raise ValueError
        return found

    parse.__name__ = f'list of {kind.__name__.strip("_")}s'
    return parse


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text.replace('_', ''))
        if value < least:
            raise argparse.ArgumentTypeError(f'{text}: must be at least {least}')
        return value

    parse.__name__ = 'count'
    return parse


def _number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def add_gin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every verb with a configuration."""
    group = parser.add_argument_group('configuration')
    group.add_argument(
        '--gin_file',
        action='append',
        default=[],
        metavar='FILE',
        help='read a gin file; later files win over earlier ones',
    )
    add_binding_flags(group)
    group.add_argument(
        '--allow_gin_imports', action='store_true', help='let gin files import modules: they then run code'
    )


def add_binding_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags that set single bindings."""
    parser.add_argument(
        '--gin_param', action='append', default=[], metavar="'X.Y = 1'", help='set one field; it wins over files'
    )
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        dest='gin_param',
        type=setting,
        metavar='X.Y=VALUE',
        help='the same without the quotes of gin: --set data.path=data/mine',
    )


def setting(text: str) -> str:
    """Returns the value of --set as --gin_param takes it. Raises ArgumentTypeError for a wrong name."""
    import lm.experiment  # noqa: F401 (registers all names)
    from lm.config.setting import write_binding

    try:
        return write_binding(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the address of a job of several processes."""
    group = parser.add_argument_group(
        'several processes', 'all three or none; Cloud TPU pods are detected without them'
    )
    group.add_argument('--coordinator_address', metavar='HOST:PORT', help='the address at which process 0 listens')
    group.add_argument('--process_count', type=int, metavar='N', help='the number of processes')
    group.add_argument('--process_id', type=int, metavar='I', help='the number of this process, from 0')


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the run whose weights a verb reads."""
    parser.add_argument('run', nargs='?', metavar='RUN', help='a run of lm train')
    parser.add_argument('--run_dir', metavar='RUN', help='the same run by a flag, in place of the first argument')
    parser.add_argument('--step', type=int, metavar='N', help='the checkpoint of this step; default: the newest')


def choose_run(arguments: argparse.Namespace) -> str:
    """Returns the value of `add_run_flags`. Raises ConfigError unless exactly one run is named."""
    verb = arguments.verb
    if arguments.run is None and arguments.run_dir is None:
        raise ConfigError(f'name the run: lm {verb} runs/quickstart')
    if None not in (arguments.run, arguments.run_dir):
        raise ConfigError(f'{arguments.run} and --run_dir {arguments.run_dir}: name one run: lm {verb} {arguments.run}')
    return arguments.run or arguments.run_dir


def pick(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the flags of these names, as arguments for a function."""
    return {name: getattr(arguments, name) for name in names}


def find_given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the flags that are given; the options have the defaults of the others."""
    return {name: value for name in names if (value := getattr(arguments, name)) not in (None, [])}


def refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raises ConfigError for a flag that would be ignored."""
    for name, value in find_given(arguments, *names).items():
        raise ConfigError(f'--{name} {value}: {why}')


def job_address(arguments: argparse.Namespace) -> 'JobAddress':
    """Returns the values of `add_job_flags`."""
    from lm.pod.job import JobAddress

    return JobAddress(arguments.coordinator_address, arguments.process_count, arguments.process_id)


def bindings(section: str, values: Mapping[str, Any]) -> list[str]:
    """Returns gin parameters for the flags that set fields of a section: 'evaluate', {'split': 'test', 'chunk': None} →
    ["evaluate.split = 'test'"]."""
    return [f'{section}.{name} = {value!r}' for name, value in values.items() if value is not None]


def read_experiment(arguments: argparse.Namespace, params: Sequence[str] = (), base: str | None = None) -> 'Experiment':
    """Returns what --gin_file, --gin_param and then `params` describe, on top of the config.gin `base`."""
    from lm.experiment import load

    params = [*arguments.gin_param, *params]
    return load(arguments.gin_file, params, allow_imports=arguments.allow_gin_imports, base=base)


def read_experiment_of_run(arguments: argparse.Namespace, params: Sequence[str] = ()) -> 'Experiment':
    """Returns the configuration of the run of `choose_run`, changed by --gin_file, --gin_param and then `params`."""
    from lm.experiment import load_of_run

    params = [*arguments.gin_param, *params]
    return load_of_run(choose_run(arguments), arguments.gin_file, params, allow_imports=arguments.allow_gin_imports)


def read_index(text: str) -> int | str:
    """Reads --index: the number of a point, or its name."""
    try:
        return int(text)
    except ValueError:
        return text


def read_points(arguments: argparse.Namespace, params: Sequence[str] = ()) -> 'list[Point]':
    """Returns the points of --sweep_file on top of --gin_file and `params`; --gin_param wins over both."""
    from lm.sweep.points import make_points

    files, allow = (arguments.gin_file, arguments.sweep_file), arguments.allow_gin_imports
    return make_points(*files, [*params, *arguments.gin_param], allow_imports=allow)
