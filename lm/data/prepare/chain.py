"""The chain from source to token: what each shard of a store was made of, and the proof that it still is.

`chain.jsonl` of a store has a line per shard: the SHA-256 of the documents as they were read, of the tokens and of the
lengths. dataset.json has the SHA-256 of that file. `lm prepare --prove` reads some shards of the source again.
"""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
from rich.console import Console

from lm.data import store
from lm.data.prepare import shards
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.settings import collect_settings, compare_settings, keep_split
from lm.data.store import TokenStore
from lm.errors import ConfigError, MismatchError
from lm.files import JsonObject, parse_json
from lm.text import format_count

FILE = 'chain.jsonl'


def write_chain(path: str, counts: Mapping[str, list[ShardCounts]]) -> dict[str, str]:
    """Writes the file of a store with these counts of shards. Returns the entry of dataset.json if all have digests."""
    if not all(c.source and c.sha256 for own in counts.values() for c in own):
        return {}
    lines = [
        json.dumps(
            {
                **{'split': split, 'shard': i, 'documents': c.documents, 'tokens': c.tokens, 'source': c.source},
                **{'tokens_sha256': c.sha256[shards.TOKENS], 'lengths_sha256': c.sha256[shards.LENGTHS]},
            }
        )
        for split, own in counts.items()
        for i, c in enumerate(own)
    ]
    content = ('\n'.join(lines) + '\n').encode()
    store.write_file(path, FILE, content)
    return {'chain': hashlib.sha256(content).hexdigest()}


def read_chain(opened: TokenStore) -> list[JsonObject]:
    """Returns the lines of a store's chain. Raises ConfigError if it has none, and MismatchError if it is damaged."""
    if 'chain' not in opened.info:
        raise ConfigError(f'--prove: {opened.path} was prepared by an earlier version, which kept no chain')
    content = store.read_file(store.open_kvstore(opened.path), FILE)
    if content is None or hashlib.sha256(content).hexdigest() != opened.info['chain']:
        raise MismatchError(f'{opened.path}/{FILE}: is damaged or gone; restore it, or prepare the data again')
    return [parse_json(line) for line in content.splitlines()]


def prove(config: PrepareConfig, path: str, share: float, console: Console | None = None) -> None:
    """Reads a share of the shards of a store's source again, tokenizes them, and compares all with the store.

    Args:
        share: above 0 and up to 1; at least one shard of each split is read.

    Raises MismatchError that names the first shard whose source or tokens differ, and ConfigError if the store was made
    in another way.
    """
    console = console or Console(markup=False, emoji=False, highlight=False)
    if not 0 < share <= 1:
        raise ConfigError(f'--prove {share:g}: must be above 0 and at most 1')
    opened = TokenStore.open(path)
    chain = read_chain(opened)
    made_with = opened.info.get('settings', {})
    config = keep_split(config, made_with)
    compare_settings(made_with, collect_settings(config), f'{path} is finished and was prepared')
    tokenizer, proved = opened.tokenizer(), 0
    for split in opened.splits:
        own = [line for line in chain if line['split'] == split]
        starts = np.cumsum([0, *(line['tokens'] for line in own)])
        found = config.require_source().shards(split)
        if len(found) != len(own):
            raise MismatchError(f'{path}: {split} was made of {len(own)} shards, and its source has {len(found)} now')
        count = max(1, round(share * len(own)))
        for i in sorted(np.random.default_rng().choice(len(own), count, replace=False).tolist()):
            line, files = own[i], ', '.join(dict.fromkeys(part.file for part in found[i].parts))
            made = shards.tokenize_shard(config, tokenizer, found[i])
            where = f'{path}: {split}, shard {i} ({files[:200]})'
            if made.counts.source != line['source']:
                raise MismatchError(f'{where}: the documents of the source have changed since; prepare the data again')
            tokens = opened.read_stored(split, starts[i : i + 1], int(starts[i + 1] - starts[i]))[0]
            if not {shards.digest_arrays(made.tokens), shards.digest_arrays([tokens])} == {line['tokens_sha256']}:
                raise MismatchError(f'{where}: its tokens differ from the tokens of the source; prepare the data again')
            proved += 1
    of = format_count(len(chain), 'shard')
    console.print(f'{path}: {proved} of {of} proved: the source is the same, and so are the tokens')
