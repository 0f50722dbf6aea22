"""The verb `lm generate`."""

import argparse
import functools
import pathlib
from collections.abc import Sequence

from lm.commands.flags import (
    add_gin_flags,
    add_job_flags,
    add_run_flags,
    choose_run,
    job_address,
    pick,
    read_experiment_of_run,
)
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument(
        '--prompt', action='append', help='the beginning of a text; several may be given; default: none'
    )
    parser.add_argument('--prompt_file', metavar='FILE', help='a file with one prompt per line')
    parser.add_argument('--text_file', metavar='FILE', help='the beginning of the text, of any length: a whole file')
    parser.add_argument(
        '--max_tokens',
        type=int,
        default=256,
        metavar='N',
        help='tokens to add, behind the end of a document too, where the name of its token is shown; default: 256',
    )
    parser.add_argument(
        '--temperature',
        type=float,
        default=1.0,
        metavar='T',
        help='how random the tokens are; 0 takes the most probable token',
    )
    parser.add_argument('--top_k', type=int, metavar='K', help='draw from the K most probable tokens alone')
    parser.add_argument(
        '--top_p', type=float, metavar='P', help='draw from the most probable tokens alone that make up P'
    )
    parser.add_argument('--seed', type=int, default=0, help='the seed of the draws; default: 0')
    parser.add_argument(
        '--stop',
        action='append',
        default=[],
        metavar='TEXT',
        help="end before this text, or before the token of this name, such as '<|im_end|>'; several may be given",
    )
    parser.add_argument(
        '--special_tokens',
        action='store_true',
        help="names of special tokens in a prompt become these tokens, such as '<|im_start|>'",
    )
    parser.add_argument('--json', action='store_true', help='print JSON instead of text: an object per prompt')
    add_gin_flags(parser)
    add_job_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    experiment = read_experiment_of_run(arguments)

    from lm.inference.decoding import Sampling
    from lm.inference.generation import write_continuations

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    if arguments.max_tokens < 1:
        raise ConfigError(f'--max_tokens {arguments.max_tokens}: must be at least 1')
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f'--seed {arguments.seed}: must be 0 to {2**32 - 1}')
    return functools.partial(
        write_continuations,
        experiment,
        choose_run(arguments),
        arguments.step,
        job_address(arguments),
        prompts=read_prompts(arguments.prompt, arguments.prompt_file, arguments.text_file),
        sampling=sampling,
        as_json=arguments.json,
        **pick(arguments, 'max_tokens', 'seed', 'stop', 'special_tokens'),
    )


def read_prompts(
    prompt: str | Sequence[str] | None = None, prompt_file: str | None = None, text_file: str | None = None
) -> list[str]:
    """Returns the texts to continue. Raises ConfigError for two sources, and for a file that is not UTF-8 text."""
    given = {'prompt': prompt, 'prompt_file': prompt_file, 'text_file': text_file}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise ConfigError(f'--{first} and --{second}: give one of them')
    name, value = next(iter(given.items()), ('prompt', ''))
    if name == 'prompt':
        texts = [value] if isinstance(value, str) else list(value)
        if any('\ud800' <= character <= '\udfff' for text in texts if not text.isascii() for character in text):
            raise ConfigError('--prompt: is not text in UTF-8')
        return texts
    path = pathlib.Path(value)
    if not path.exists() or path.is_dir():  # a pipe works
        raise ConfigError(f'--{name} {path}: no such file')
    try:
        text = path.read_bytes().decode('utf-8-sig')  # carriage returns stay, and a byte order mark goes, as in prepare
    except UnicodeDecodeError:
        raise ConfigError(f'--{name} {path}: is not text in UTF-8') from None
    if name == 'text_file':
        return [text]
    if not text:
        raise ConfigError(f'--prompt_file {path}: is empty; write one prompt per line')
    return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]


VERB = Verb(
    place=40,
    help='continue a text with the weights of a run',
    example="lm generate runs/quickstart --prompt 'def main(' --max_tokens 200",
    only_prints=True,
)
