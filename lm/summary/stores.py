"""The contents of a token store."""

from lm.data.store import TokenStore
from lm.errors import MismatchError
from lm.files import JsonObject


def inspect_store(path: str, verify: bool = False) -> JsonObject:
    """Returns the source and the size of the token store in `path`."""
    store = TokenStore.open(path)
    damage, splits = [], {}
    for split in store.splits:
        tokens, n_bytes, words = store.tokens(split), store.bytes(split), store.words(split)
        splits[split] = {
            'documents': store.documents(split),
            'bytes': n_bytes,
            'words': words,
            'tokens': tokens,
            'bytes_per_token': n_bytes / tokens if tokens else None,
            'sha256': store.info['splits'][split].get('sha256'),
            'health': 'not verified',
        }
        if verify:
            try:
                store.verify(split)
                splits[split]['health'] = 'verified'
            except MismatchError as error:
                splits[split]['health'] = 'damaged'
                damage.append(str(error))
    if verify:
        try:
            store.tokenizer()
        except MismatchError as error:
            damage.append(str(error))
    others = {k: v for k, v in store.info.items() if k not in ('splits', 'checksum')}
    return {'kind': 'token store', 'path': path, 'splits': splits, **others, 'damage': damage}
