"""The verb `lm inspect`."""

import argparse
import functools
import re

from lm.commands.flags import add_gin_flags, pick, refuse
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

SENTENCE = 'The cat sat on the mat.'
OF_ATTENTION = ('heads', 'tokens', 'step', 'out', 'gin_file', 'gin_param')
"""The flags that only have a meaning with --attention."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('path', metavar='PATH', help='a run directory, a sweep or a token store')
    parser.add_argument('--verify', action='store_true', help='read everything and compare checksums')
    parser.add_argument('--json', action='store_true', help='print JSON instead of tables')
    parser.add_argument(
        '--attention',
        nargs='?',
        const=SENTENCE,
        metavar='TEXT',
        help=f'of a run: draw what each head weighs for this text; without one: {SENTENCE!r}',
    )
    parser.add_argument(
        '--heads',
        type=read_heads,
        metavar='LAYER-HEAD,…',
        help='with --attention: draw only these heads, counted from 0',
    )
    parser.add_argument('--tokens', type=int, metavar='N', help='with --attention: draw only the first N tokens')
    parser.add_argument(
        '--step', type=int, metavar='N', help='with --attention: the checkpoint of this step; default: the newest'
    )
    parser.add_argument(
        '--out', metavar='PATH', help='with --attention: the name of the picture, without .png; default: attention'
    )
    add_gin_flags(parser)


def read_heads(text: str) -> list[tuple[int, int]]:
    """Reads '0-1,2-0' as pairs of a layer and a head. Raises ArgumentTypeError for anything else."""
    if not re.fullmatch(r'\d+-\d+(,\d+-\d+)*', text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be pairs of a layer and a head, such as '0-1,2-0'")
    pairs = (part.split('-') for part in text.split(','))
    return [(int(layer), int(head)) for layer, head in pairs]


def make_call(arguments: argparse.Namespace) -> Call:
    if arguments.attention is not None:
        return make_attention_call(arguments)
    refuse(arguments, OF_ATTENTION, 'is of the picture of weights; add --attention')
    from lm.summary.inspect import inspect_path

    return functools.partial(
        inspect_path,
        arguments.path,
        verify=arguments.verify,
        as_json=arguments.json,
        allow_imports=arguments.allow_gin_imports,
    )


def make_attention_call(arguments: argparse.Namespace) -> Call:
    """Makes the call that draws weights; its configuration may differ from the run's, as in `lm evaluate`."""
    from lm.experiment import load_of_run
    from lm.summary.attention import show_attention

    if arguments.verify:
        raise ConfigError('--verify: reads a whole run and draws nothing; leave it or --attention out')
    if arguments.tokens is not None and arguments.tokens < 1:
        raise ConfigError(f'--tokens {arguments.tokens}: must be at least 1')
    gin = (arguments.gin_file, arguments.gin_param)
    experiment = load_of_run(arguments.path, *gin, allow_imports=arguments.allow_gin_imports)
    return functools.partial(
        show_attention,
        experiment,
        arguments.path,
        arguments.step,
        text=arguments.attention,
        out=arguments.out or 'attention',
        as_json=arguments.json,
        **pick(arguments, 'heads', 'tokens'),
    )


VERB = Verb(
    place=110,
    help='show what a run, a sweep or a token store holds, or what its attention weighs',
    example='lm inspect runs/quickstart --verify',
    only_prints=True,
)
