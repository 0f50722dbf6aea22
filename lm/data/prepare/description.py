"""The description of a token store: dataset.json, and what `lm prepare` prints about it."""

import importlib.metadata
import json

from rich import box
from rich.console import Console
from rich.table import Table

import lm
from lm.data import store
from lm.data.prepare.chain import write_chain
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.settings import explain_empty_share
from lm.data.prepare.shards import uses_special_tokens
from lm.data.sources.base import Shard, inventory
from lm.data.store import COPIES
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError, MismatchError
from lm.files import JsonObject
from lm.text import format_count, make_visible

FORMAT = 1
SAMPLED = 64
"""Documents of a split that show how documents of ready tokens begin."""


def describe_split(config: PrepareConfig, name: str, counts: list[ShardCounts], shards: list[Shard]) -> JsonObject:
    """Returns the entry of a split, without its SHA-256, from its shards and their counts.

    Raises ConfigError for a split to which a held-out share leaves no document, and MismatchError for another empty
    one.
    """
    names = ('documents', 'bytes', 'words', 'tokens', 'decoded', 'unchanged')
    split = {key: sum(getattr(c, key) for c in counts) for key in names}
    split['bad_records'] = sum(len(c.bad) for c in counts)
    held_out = shards[0].held_out
    if not split['documents'] and held_out is not None and not split['bad_records']:
        raise ConfigError(explain_empty_share(config, name, held_out))
    if not split['documents']:
        raise MismatchError(f'split {name!r}: no usable documents; leave it out with prepare.splits, or see the source')
    published = config.require_source().published_words(name, split['documents'])
    return split if published is None else split | {'published_words': published}


def finish_store(
    config: PrepareConfig,
    path: str,
    shards: dict[str, list[Shard]],
    settings: dict[str, object],
    tokenizer: Tokenizer,
    splits: dict[str, dict[str, object]],
    counts: dict[str, list[ShardCounts]],
) -> dict[str, object]:
    """Writes all files of a store behind its arrays, dataset.json last. Returns the contents of dataset.json."""
    bad = [record for own in counts.values() for c in own for record in c.bad]
    store.write_file(path, tokenizer.file_name, tokenizer.model)
    may_begin = config.require_source().holds_tokens or uses_special_tokens(config)
    begin_id = find_begin_id(path, tokenizer, splits) if may_begin else None
    store.write_file(path, 'bad_records.jsonl', ''.join(json.dumps(record) + '\n' for record in bad).encode())
    info = {
        'format': FORMAT,
        'source': settings['source'],
        'cleaning': config.cleaning,
        'dtype': tokenizer.dtype.name,
        'files': inventory(shard for own in shards.values() for shard in own),
        'splits': splits,
        **({store.MARKS: True} if config.require_source().marks_answers else {}),
        'tokenizer': {
            'file': tokenizer.file_name,
            'sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size,
            'eod_id': tokenizer.eod_id,
            'begin_id': begin_id,
            'lossless': tokenizer.lossless,
            **({} if tokenizer.holds_text else {'holds_text': False}),
        },
        'settings': settings,
        'created_with': describe_versions(tokenizer),
        **write_chain(path, counts),
    }
    return store.write_info(path, info)


def find_begin_id(path: str, tokenizer: Tokenizer, splits: dict[str, JsonObject]) -> int | None:
    """Returns the special token that each of many documents of ready tokens begins with; None: there is none.

    A text holds special tokens only where its source, or the configuration, says so. Of each split SAMPLED documents
    are read.
    """
    described = {'vocab_size': tokenizer.vocab_size, 'eod_id': tokenizer.eod_id}
    info = {'splits': splits, 'tokenizer': described, 'dtype': tokenizer.dtype.name, store.MARKS: True}
    opened = store.TokenStore(path, info)
    found: set[int] = set()
    for name, split in splits.items():
        count = split['documents']
        chosen = sorted({i * count // SAMPLED for i in range(SAMPLED)})
        starts = [0 if i == 0 else int(opened.document_ends(name, i - 1, i)[0]) for i in chosen]
        found |= set(opened.read_many(name, starts, 1)[:, 0].tolist())
        if len(found) > 1:
            return None
    (begin,) = found
    return begin if begin in tokenizer.special_ids and begin != tokenizer.eod_id else None


def describe_versions(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the versions of the packages that make the tokens."""
    return {'lm': lm.__version__, tokenizer.library: importlib.metadata.version(tokenizer.library)}


def check_strict(config: PrepareConfig, path: str, info: JsonObject) -> None:
    """Raises MismatchError where bad records are to stop a preparation, and the store was made without some."""
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if config.strict and bad:
        raise MismatchError(
            f'{path} was prepared without {bad} bad records (see bad_records.jsonl); mend them, delete the store and '
            'prepare it again'
        )


def print_summary(config: PrepareConfig, path: str, info: JsonObject, console: Console) -> None:
    """Prints the sizes of a new store, and what its user should know."""
    source = config.require_source()
    console.print(make_table(info))
    decoded, unchanged = (sum(split[key] for split in info['splits'].values()) for key in ('decoded', 'unchanged'))
    if decoded:
        share = f'{100 * unchanged / decoded:.4g} %'
        compared = format_count(decoded, 'document that was compared', 'documents that were compared')
        verb = 'encode' if source.holds_tokens else 'decode'
        console.print(f'{share} of {compared} {verb} to themselves')
    for name, split in info['splits'].items():
        if (copies := split.get(COPIES, {})).get('documents'):
            share = 100 * copies['tokens'] / split['tokens']
            of = f'{copies["documents"]:,} of {format_count(split["documents"], "document")}'
            line = f'{name}: {of} ({share:.3g} % of the tokens) are copies of documents in train'
            console.print(f'{line}: their perplexity says little about new text', soft_wrap=True)
        elif COPIES in split:
            console.print(f'{name}: none of its documents are copies of documents in train')
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if bad:
        skipped = format_count(bad, 'bad record was', 'bad records were')
        console.print(f'{skipped} skipped: {path}/bad_records.jsonl names them')
    if 'validation' not in info['splits'] and not config.splits:
        other = "; or train with data.eval_split = 'train'" if 'train' in info['splits'] else ''
        remedy = f'{source.how_to_hold_out}{other}'
        line = f'there is no validation split, on which lm train evaluates: {remedy}'
        console.print(line, soft_wrap=True)
    if unread := source.list_unread():
        shown = ', '.join(unread[:5]) + (', …' if len(unread) > 5 else '')
        line = f'no split takes {format_count(len(unread), "file")} of the source: {shown}'
        console.print(make_visible(line), soft_wrap=True)
    console.print(f'prepared {path}  (fingerprint {info["fingerprint"][:16]})')


def make_table(info: JsonObject) -> Table:
    """Returns a table of the splits."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column('split', no_wrap=True)
    for name in ('documents', 'bytes', 'words', 'tokens', 'bytes/token', 'bad'):
        table.add_column(name, justify='right', no_wrap=True)
    for name, split in info['splits'].items():
        numbers = [f'{split[key]:,}' for key in ('documents', 'bytes', 'words', 'tokens')]
        table.add_row(name, *numbers, f'{split["bytes"] / split["tokens"]:.2f}', f'{split["bad_records"]:,}')
    return table
