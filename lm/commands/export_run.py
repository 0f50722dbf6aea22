"""The verb `lm export`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, add_run_flags, choose_run, read_experiment_of_run
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

DTYPES = ('float32', 'bfloat16')
FORMATS = ('safetensors', 'huggingface', 'native')


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument(
        '--format',
        choices=FORMATS,
        default='safetensors',
        help='huggingface: with what transformers needs to run the model; native: as a class that transformers '
        'or flash-linear-attention has; default: safetensors',
    )
    parser.add_argument(
        '--dtype', choices=DTYPES, default='float32', help='type of the numbers in the files; default: float32'
    )
    parser.add_argument(
        '--file_gb', type=float, metavar='GB', help='several files of at most so many gigabytes; default: one file'
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='a new or empty folder')
    parser.add_argument(
        '--prove',
        action='store_true',
        help='read the written files again, and compare the logits of a fixed prompt with the logits of the run',
    )
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    experiment = read_experiment_of_run(arguments)

    from lm.interop.export_run import export_run
    from lm.interop.prove import export_and_prove
    from lm.interop.tensors import WeightFiles

    size = arguments.file_gb
    if size is not None and not 1e-6 <= size <= 1e6:
        raise ConfigError(f'--file_gb {size:g}: must be 0.000001 to 1,000,000')
    run = experiment, choose_run(arguments), arguments.step
    weights = WeightFiles(arguments.dtype, None if size is None else int(size * 1e9))
    export = export_and_prove if arguments.prove else export_run
    return functools.partial(export, *run, format_name=arguments.format, out=arguments.out, weights=weights)


VERB = Verb(
    place=50,
    help='write the weights of a run for other programs',
    example='lm export runs/quickstart --format huggingface --out exports/quickstart',
)
