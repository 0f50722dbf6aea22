"""The settings that a token store depends on: collected from a configuration, and compared with an existing store."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lm.data import tokenizers
from lm.data.prepare.config import PrepareConfig
from lm.data.sources.base import HELD_OUT_BY, inventory
from lm.data.tokenizers.sentencepiece import check_trained_end
from lm.errors import ConfigError, LmError
from lm.files import JsonObject, is_remote, local_path, open_path
from lm.folders import STORE, check_unshared
from lm.text import format_count, format_si

_SLICE = re.compile(r'\[[^\]]*\]?')
"""How TFDS writes a part of a split behind its name."""


def collect_settings(config: PrepareConfig) -> JsonObject:
    """Returns all that the contents of the store depend on."""
    choice = config.tokenizer
    existing = tokenizers.load_existing(choice)
    tokenizer: JsonObject = choice.settings() if existing is None else {'model_sha256': existing.sha256}
    if choice.end_of_document is not None:
        if existing is None and isinstance(choice, tokenizers.TokenizerConfig):
            check_trained_end(choice.end_of_document)
        tokenizer['end_of_document'] = choice.end_of_document
    elif existing is not None and existing.eod_id != _find_usual_end(existing):
        # config.json or run.json beside it names another end.
        tokenizer['end_of_document'] = existing.eod_id
    settings = {
        'source': config.require_source().identity(),
        'splits': list(choose_splits(config)),
        'cleaning': config.cleaning,
        'max_document_bytes': config.max_document_bytes,
        'tokenizer': tokenizer,
    }
    if config.special_tokens:  # stores of earlier versions do not say it
        settings['special_tokens'] = True
    return json.loads(json.dumps(settings))


def keep_split(config: PrepareConfig, settings: Mapping[str, Any] | None) -> PrepareConfig:
    """Returns the configuration with the rule that holds documents out in a preparation that has these settings.

    It is the rule of earlier versions where they made or began it; None: nothing is begun.
    """
    if settings is None or HELD_OUT_BY in settings.get('source', {}):
        return config
    return dataclasses.replace(config, source=config.require_source().keep_old_split())


def explain_empty_share(config: PrepareConfig, split: str, held_out: float) -> str:
    """Returns why a split has no document, where a share of the documents is held out, and the remedy."""
    return (
        f'{config.require_source().gin_name}.validation_fraction = {held_out:g}: by the hash of each text, where '
        f'copies stay together, no document is left to the split {split!r}; change it, add files for the split, or '
        "set prepare.splits = ('train',) and data.eval_split = 'train'"
    )


def _find_usual_end(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns the end of documents that the file of a tokenizer says by itself; None if it says none."""
    try:
        return tokenizers.from_bytes(tokenizer.model).eod_id
    except ConfigError:
        return None


def choose_splits(config: PrepareConfig) -> tuple[str, ...]:
    """Returns the splits to prepare. Raises ConfigError for one that the source does not have."""
    found = config.require_source().splits()
    for name in config.splits or ():
        if name in found:
            continue
        if parts := [part for part in map(str.strip, _SLICE.sub('', name).split('+')) if part in found]:
            whole = ', '.join(map(repr, dict.fromkeys(parts))) + (',' if len(set(parts)) == 1 else '')
            raise ConfigError(
                f'prepare.splits: {name!r} is a part or a sum of splits, as TFDS writes it; splits are prepared whole '
                f'and one by one: set prepare.splits = ({whole})'
            )
        raise ConfigError(
            f'prepare.splits: {name!r} is not in the source, which has {", ".join(found)}; name some of these'
        )
    return config.splits or found


def compare_settings(old: JsonObject, new: JsonObject, what: str, section: str = 'prepare') -> None:
    """Raises ConfigError that names the first setting that differs."""
    remedy = 'choose another data.path or delete it'
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if was == now or (key == 'path' and _is_same_place(was, now)):
            continue
        if isinstance(was, dict) and isinstance(now, dict) and was.get('kind') == now.get('kind'):
            compare_settings(was, now, what, now.get('kind', key))
            continue
        if key == 'listing':
            raise ConfigError(f'{what} from other files: the files of the source have changed; {remedy}')
        if isinstance(was, dict) and isinstance(now, dict):
            was, now = (x.get('kind', 'another') for x in (was, now))
        raise ConfigError(f'{what} with {section}.{key} = {was!r}, not {now!r}; {remedy}')


def _is_same_place(was: object, now: object) -> bool:
    """Returns whether two paths, or patterns of paths, differ in their form alone, such as in a / at the end."""
    return isinstance(was, str) and isinstance(now, str) and os.path.abspath(was) == os.path.abspath(now)


def describe_change(config: PrepareConfig, info: JsonObject) -> str | None:
    """Describes how the files of the source differ, by their names and sizes, from the files that a store was made of.

    Returns None where they are the same, where they are gone, and where an earlier version made the store. Also for
    files in a bucket, where each file would cost a request.
    """
    source = config.require_source()
    was, values = info.get('files'), dataclasses.asdict(source).values()
    if was is None or any(isinstance(value, str) and is_remote(value) for value in values):
        return None
    try:
        now = inventory(shard for name in choose_splits(config) for shard in source.shards(name))
    except (LmError, OSError):
        return None
    old, new = (f'{format_count(files["count"], "file")} of {format_si(files["bytes"])}B' for files in (was, now))
    return None if now == was else f'{old} to {"others of that size" if new == old else new}'


def check_place(config: PrepareConfig, path: str) -> None:
    """Raises ConfigError where a new store would lie among the files of a run, of a sweep or of its source."""
    place = open_path(path, 'data.path')
    check_unshared(place, f'data.path = {path!r}', STORE)
    source = config.require_source()
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        is_folder = isinstance(value, str) and value and not is_remote(value)
        if is_folder and not is_remote(path) and local_path(value).resolve() == local_path(path).resolve():
            raise ConfigError(
                f'data.path = {path!r}: is {source.gin_name}.{field.name}, the folder of the text; name another one'
            )


def check_ready_tokens(config: PrepareConfig) -> None:
    """Raises ConfigError unless the tokenizer of a source of ready tokens is named, and is the one of its tokens."""
    source = config.require_source()
    if not source.holds_tokens:
        return
    setting = f'prepare.source = @{source.gin_name}()'
    tokenizer = tokenizers.load_existing(config.tokenizer)
    if tokenizer is None and not isinstance(config.tokenizer, tokenizers.TokenizerConfig):
        tokenizer = tokenizers.from_bytes(config.tokenizer.contents())
    if tokenizer is None:
        raise ConfigError(f'{setting}: holds tokens; name the tokenizer that made them with tokenizer.model_path')
    if config.cleaning != 'none':
        raise ConfigError(f"{setting}: holds tokens, which cannot be cleaned; set prepare.cleaning = 'none'")
    source.check_eod(tokenizer.eod_id)
