"""The verb `lm report`."""

import argparse
import functools

from lm.commands.flags import pick
from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('paths', nargs='+', metavar='PATH', help='run directories, sweeps, or globs of them')
    parser.add_argument('--out', required=True, metavar='DIR', help='a folder for the page, tables and pictures')
    parser.add_argument('--split', help='evaluations of this split count; default: the split of the training')
    parser.add_argument(
        '--paper', choices=('pg19', 'wiki40b', 'none'), help="the paper's table to compare with; default: by the data"
    )
    parser.add_argument(
        '--ladder',
        metavar='PATH',
        help='runs of a baseline at three sizes or more: fit the curve of its loss against compute, and give each run '
        'its effective speed-up',
    )
    parser.add_argument('--no_pictures', dest='pictures', action='store_false', help='no PNG and PDF files')
    parser.add_argument(
        '--any_conditioning',
        action='store_true',
        help='compare perplexities whose windows begin after different tokens, too',
    )
    parser.add_argument(
        '--watch', action='store_true', help='write it again whenever a run changes, until Ctrl-C; the page reloads'
    )


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.report.watch import watch_report
    from lm.report.write import write_report

    write = watch_report if arguments.watch else write_report
    options = pick(arguments, 'split', 'ladder', 'pictures', 'any_conditioning')
    return functools.partial(write, arguments.paths, arguments.out, corpus=arguments.paper, **options)


VERB = Verb(
    place=90,
    help='turn runs into a page, tables and pictures',
    example="lm report runs/sweep 'runs/quickstart*' --out report",
)
