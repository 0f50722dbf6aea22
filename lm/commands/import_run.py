"""The verb `lm import`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'folder',
        nargs='?',
        metavar='DIR',
        help='model.safetensors and config.json, an export of lm, or a .gguf file; left out: --tokenizer completes RUN',
    )
    parser.add_argument('--run_dir', required=True, metavar='RUN', help='the run that is made: a new folder')
    parser.add_argument(
        '--tokenizer', metavar='FILE', help='the tokenizer of the checkpoint; default: the one that it has'
    )
    parser.add_argument(
        '--prove',
        action='store_true',
        help='keep the logits of a fixed prompt, and compare them with the logits of a proved export; the whole model '
        'must fit into memory',
    )
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.interop.import_run import complete_import, import_run, load_given
    from lm.interop.prove import import_and_prove

    folder, run_dir, allow = arguments.folder, arguments.run_dir, arguments.allow_gin_imports
    if folder is None:
        if arguments.tokenizer is None:
            raise ConfigError('DIR: name a checkpoint to import, or give --tokenizer to complete an import')
        return functools.partial(complete_import, run_dir, arguments.tokenizer)
    experiment = load_given(folder, arguments.gin_file, arguments.gin_param, allow_imports=allow)
    make = import_and_prove if arguments.prove else import_run
    return functools.partial(make, experiment, folder, run_dir, tokenizer=arguments.tokenizer, allow_imports=allow)


VERB = Verb(
    place=60,
    help='make a run of a checkpoint of Hugging Face or llama.cpp, or of what lm export has written',
    example='lm import checkpoints/llama --run_dir runs/llama',
)
