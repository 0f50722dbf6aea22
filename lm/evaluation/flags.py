"""The flags of `lm evaluate`. Imports nothing heavy: every `lm --help` reads it."""

import argparse


def evaluate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--split', help='which split; default: data.eval_split')
    parser.add_argument('--context_length', type=int, metavar='N', help='default: as in training')
    parser.add_argument('--window', help="'disjoint' or 'sliding:STRIDE'")
    parser.add_argument('--batch_size', type=int, metavar='N', help='windows at a time')
    parser.add_argument('--chunk', type=int, metavar='N', help='tokens of a window at a time; default: the whole')
    parser.add_argument(
        '--tasks',
        metavar='A,B,…',
        help='tasks of lm-evaluation-harness, or .jsonl files of questions, in place of a split',
    )
    parser.add_argument('--num_fewshot', type=int, metavar='N', help='of tasks: examples in front of each question')
    parser.add_argument('--include_path', metavar='DIR', help='of tasks: a folder of your own (YAML)')
    parser.add_argument('--task_data', metavar='DIR', help='of tasks: DIR/TASK holds the data set, not the hub')
    parser.add_argument('--limit', type=int, metavar='N', help='of tasks: only the first N examples of each')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
