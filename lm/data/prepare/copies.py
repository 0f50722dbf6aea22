"""Documents that stand in the training split and in another one, letter by letter.

A model may have learned them by heart: their perplexity says little about new text.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.shards import HASHES, LENGTHS, name_shards, read_parts
from lm.data.prepare.shared_folder import SharedFolder

TRAIN = 'train'


def count_copies(folder: SharedFolder, counts: Mapping[str, list[ShardCounts]]) -> dict[str, dict[str, int]]:
    """Returns split → the documents and tokens of it that are copies of training documents.

    There is no training split in it. It is empty without one, and where an earlier version made some of the shards. The
    memory that it takes depends on a few training shards and on the other splits.
    """
    others = [split for split in counts if split != TRAIN]
    if TRAIN not in counts or not others or not all(HASHES in c.sha256 for own in counts.values() for c in own):
        return {}

    def read(split: str, suffix: str) -> Iterator[bytes]:
        return read_parts(folder, name_shards(split, len(counts[split])), counts[split], suffix)

    hashes = {split: np.frombuffer(b''.join(read(split, HASHES)), np.uint64) for split in others}
    known = np.unique(np.concatenate(list(hashes.values())))
    is_copied = np.zeros(len(known), bool)
    for content in read(TRAIN, HASHES):
        own = np.frombuffer(content, np.uint64)
        places = np.searchsorted(known, own)
        inside = places < len(known)
        places, own = places[inside], own[inside]
        is_copied[places[known[places] == own]] = True
    found = {}
    for split in others:
        copies = is_copied[np.searchsorted(known, hashes[split])]
        tokens = np.frombuffer(b''.join(read(split, LENGTHS)), np.int64)[copies].sum()
        found[split] = {'documents': int(copies.sum()), 'tokens': int(tokens)}
    return found
