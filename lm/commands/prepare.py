"""The verb `lm prepare`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, bindings, pick, read_experiment
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--strict', action='store_true', default=None, help='stop at the first bad record')
    parser.add_argument(
        '--special_tokens',
        action='store_true',
        default=None,
        help='names of special tokens in the text become these tokens',
    )
    parser.add_argument('--processes', type=int, metavar='N', help='worker processes; default: one per CPU core')
    parser.add_argument('--shard', metavar='I/N', help='do share I, counted from 0, of the work that N machines divide')
    parser.add_argument(
        '--assemble',
        action='store_true',
        help='join what the machines of --shard have made; with --shard, a share of it',
    )
    parser.add_argument(
        '--prove',
        type=float,
        metavar='SHARE',
        help='check a finished store: read this share of its source again, such as 0.01, and compare the tokens',
    )
    parser.add_argument('--engine', choices=('beam',), help='what divides the work; default: processes of this machine')
    parser.add_argument(
        '--beam_options', default='', metavar="'--X=Y …'", help='with --engine beam: options for its runner'
    )
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.data.prepare.beam import prepare_with_beam
    from lm.data.prepare.chain import prove
    from lm.data.prepare.parts import read_share
    from lm.data.prepare.run import run
    from lm.data.prepare.stages import prepare

    in_shares = arguments.shard is not None or arguments.assemble
    if arguments.engine and in_shares:
        raise ConfigError(
            f'--engine {arguments.engine}: shares the work out by itself; leave out --shard and --assemble'
        )
    if arguments.beam_options and not arguments.engine:
        raise ConfigError(f'--beam_options {arguments.beam_options!r}: is of Beam; add --engine beam')
    share = read_share(arguments.shard or '0/1')
    experiment = read_experiment(
        arguments, bindings('prepare', pick(arguments, 'strict', 'processes', 'special_tokens'))
    )
    job = experiment.prepare, experiment.data.path
    if arguments.prove is not None:
        if arguments.engine or in_shares:
            raise ConfigError('--prove: compares a finished store; leave out --shard, --assemble and --engine')
        return functools.partial(run, prove, *job, arguments.prove)
    if arguments.engine:
        return functools.partial(run, prepare_with_beam, *job, arguments.beam_options)
    return functools.partial(run, prepare, *job, None, share, arguments.assemble)


VERB = Verb(place=10, help='turn text into a token store', example='lm prepare --gin_file data/quickstart.gin')
