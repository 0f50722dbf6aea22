"""Documents that stand in the training split and in another one, letter by letter.

A model may have learned them by heart: their perplexity says little about new text.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.shards import HASHES, Result

TRAIN = 'train'


def count_copies(
    results: Mapping[str, list[Result]], counts: Mapping[str, list[ShardCounts]]
) -> dict[str, dict[str, int]]:
    """Returns split → the documents and tokens of it that are copies of training documents.

    There is no training split in it. It is empty without one, and where an earlier version made some of the shards. The
    memory that it takes depends on the largest training shard and on the other splits.
    """
    others = [split for split in results if split != TRAIN]
    if TRAIN not in results or not others or not all(HASHES in c.sha256 for own in counts.values() for c in own):
        return {}
    hashes = {split: _join(result.hashes() for result in results[split]) for split in others}
    known = np.unique(np.concatenate(list(hashes.values())))
    is_copied = np.zeros(len(known), bool)
    for result in results[TRAIN]:
        own = result.hashes()
        places = np.searchsorted(known, own)
        inside = places < len(known)
        places, own = places[inside], own[inside]
        is_copied[places[known[places] == own]] = True
    found = {}
    for split in others:
        copies = is_copied[np.searchsorted(known, hashes[split])]
        lengths = _join(result.lengths() for result in results[split])
        found[split] = {'documents': int(copies.sum()), 'tokens': int(lengths[copies].sum())}
    return found


def _join(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(arrays))
