"""The verb `lm import`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags
from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('folder', metavar='DIR', help='model.safetensors and config.json, or an export of lm')
    parser.add_argument('--run_dir', required=True, metavar='RUN', help='a new folder, for train.init_from and lm load')
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.interop.import_run import import_run, load_given

    folder, run_dir, allow = arguments.folder, arguments.run_dir, arguments.allow_gin_imports
    experiment = load_given(folder, arguments.gin_file, arguments.gin_param, allow_imports=allow)
    return functools.partial(import_run, experiment, folder, run_dir, allow_imports=allow)


VERB = Verb(
    name='import',
    place=60,
    help='make a run of a checkpoint of another program, or of what lm export has written',
    example='lm import checkpoints/llama --run_dir runs/llama',
    add_flags=add_flags,
    make_call=make_call,
)
