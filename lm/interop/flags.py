"""The flags of `lm export` and `lm import`. Imports nothing heavy: every `lm --help` reads it."""

import argparse

FORMATS = ('safetensors', 'huggingface')


def export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--format',
        choices=FORMATS,
        default='safetensors',
        help='huggingface: with what transformers needs to run the model; default: safetensors',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='a new or empty folder')


def import_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('folder', metavar='DIR', help='model.safetensors and config.json, or an export of lm')
    parser.add_argument('--run_dir', required=True, metavar='RUN', help='a new folder, for train.init_from and lm load')
