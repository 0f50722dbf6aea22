"""`lm inspect`: what a run directory, a sweep or a token store holds, without touching a device or changing a byte."""

import datetime
import math
import sys
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

import lm.experiment  # noqa: F401 (fills the registry, which knows the names of bindings)
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import Damaged, Snapshot
from lm.data.store import TokenStore
from lm.errors import ConfigError, LmError, MismatchError
from lm.runs.goodput import describe
from lm.runs.records import Run, is_run, read_json, to_json
from lm.text import duration, perplexity, si
from lm.training.step import count_parameters, part_of

MEASURES = ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte', 'accuracy')

if TYPE_CHECKING:
    from rich.console import Console


def main(_: Any, arguments: Any) -> int:
    """The `lm inspect` command. Raises MismatchError, after everything was printed, if something is damaged."""
    # The accelerators of this machine may be busy with the very run that is looked at.
    jax.config.update('jax_platforms', 'cpu')
    path = epath.Path(arguments.path).expanduser()
    if (path / 'dataset.json').exists():
        found, show = inspect_store(arguments.path, arguments.verify), print_store
    elif is_run(path):
        found, show = inspect_run(path, arguments.verify), print_run
    elif (path / 'sweep.json').exists():
        found, show = read_json(path / 'sweep.json'), print_sweep
    elif not path.exists():
        raise ConfigError(f'{arguments.path}: does not exist; name a run directory, a sweep or a token store')
    else:
        raise ConfigError(f'{arguments.path}: holds no config.gin, sweep.json or dataset.json, so it is nothing of lm')
    if arguments.json:
        print(to_json(found))
    else:
        from rich.console import Console

        show(found, Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False))
    if damage := found.get('damage'):
        raise MismatchError(f'{arguments.path}: {damage[0]}' + (f' (and {len(damage) - 1} more)' if damage[1:] else ''))
    return 0


# ---------------------------------------------------------------------------------------------------------------- runs


def inspect_run(path: epath.PathLike, verify: bool = False) -> dict[str, Any]:
    """What the run in `path` was told, how far it is, and its checkpoints.

    Args:
        verify: read every checkpoint whole and compare checksums.
    """
    run = Run.read(path)
    checkpoints = []
    for step in saved_steps(run.directory.checkpoints):
        try:
            found = inspect_checkpoint(run, step, verify)
        except FileNotFoundError:
            continue  # a run that goes on deletes old checkpoints
        if (run.directory.checkpoints / str(step)).exists():
            checkpoints.append(found)
    return {
        'kind': 'run',
        'path': str(run.directory.path),
        'status': 'finished' if run.is_finished() else 'not finished',
        'step': run.step,
        'steps': run.total_steps,
        'last_train': run.train[-1] if run.train else None,
        'tokens_per_second': run.tokens_per_second,
        'goodput': run.goodput,
        'last_eval': run.last_evaluation,
        'evaluations': len(run.evaluations),
        'parameters': parameters(run),
        'checkpoints': checkpoints,
        'set_aside': set_aside(run.directory.checkpoints),
        'fingerprints': {name: run.info.get(name) for name in ('data', 'tokenizer')},
        'configuration': run.config,
        'attention': run.attention,
        'info': run.info,
        'damage': [f'checkpoint step {c["step"]}: {c["health"]}' for c in checkpoints if not c['sound']],
    }


def saved_steps(directory: epath.Path) -> list[int]:
    """The steps in a folder of checkpoints, damaged ones too."""
    if not directory.exists():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def set_aside(directory: epath.Path) -> list[str]:
    """What is no step: damaged and abandoned steps that were renamed, and saves that are going on or were cut off."""
    if not directory.exists():
        return []
    return sorted(p.name for p in directory.iterdir() if not p.name.isdigit())


def inspect_checkpoint(run: Run, step: int, verify: bool) -> dict[str, Any]:
    """Step, size, time, health, and the loss of its evaluation."""
    path = run.directory.checkpoints / str(step)
    snapshot = Snapshot(run.directory.checkpoints, step)
    health, sound, record = 'complete', True, {}
    try:
        record = snapshot.record()
        if verify:
            with Checkpointer(run.directory.checkpoints) as checkpointer:
                checkpointer.verify(step)
            health = 'verified'
    except (Damaged, LmError) as damage:
        health, sound = ' '.join(str(damage).split()), False
    committed = path / 'commit_success.txt'
    saved = committed.stat().mtime if committed.exists() else None
    return {
        'step': step,
        'bytes': size_of(path),
        'saved': saved and datetime.datetime.fromtimestamp(saved, datetime.UTC).isoformat(timespec='seconds'),
        'health': health,
        'sound': sound,
        'loss': record.get('metrics', {}).get('loss'),
        'arrays': len(record.get('leaves', ())),
        'fingerprints': record.get('fingerprints', {}),
    }


def size_of(path: epath.Path) -> int:
    """Bytes of all files below `path`."""
    total = 0
    for entry in path.iterdir():
        total += size_of(entry) if entry.is_dir() else entry.stat().length
    return total


def parameters(run: Run) -> dict[str, int]:
    """Trainable parameters by part: from the newest checkpoint, or, before there is one, from the configuration."""
    for step in reversed(saved_steps(run.directory.checkpoints)):
        try:
            leaves = Snapshot(run.directory.checkpoints, step).record()['leaves']
        except (Damaged, LmError):
            continue
        counts = dict.fromkeys(('embedding', 'attention', 'mechanism', 'glu', 'norms'), 0)
        for name, leaf in leaves.items():
            if name.startswith('params.'):
                counts[part_of(name.split('.')[1:])] += math.prod(leaf['shape'])
        return counts
    from lm.experiment import load

    return count_parameters(load([str(run.directory.config)]).model)


# -------------------------------------------------------------------------------------------------------- token stores


def inspect_store(path: str, verify: bool = False) -> dict[str, Any]:
    """What the token store in `path` was made of and how much of it there is."""
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


# ------------------------------------------------------------------------------------------------------------ printing


def print_run(found: dict[str, Any], console: 'Console') -> None:
    """The run for people."""
    get, info = found['configuration'].get, found['info']
    train, evaluation = found['last_train'], found['last_eval']
    steps = found['steps']
    rows = {
        'run': found['path'],
        'status': f'{found["status"]}, step {found["step"]:,} of {steps:,} ({found["step"] / max(steps, 1):.0%})',
        'started': ', resumed '.join([str(info.get('started')), *info.get('resumed', [])[-1:]])
        + (f' ({len(info["resumed"])} times in all)' if len(info.get('resumed', [])) > 1 else ''),
        'model': f'{get("model.n_layers")} layers of width {get("model.d_model")}, {get("model.n_heads")} heads of '
        f'{get("model.head_dim")}, {found["attention"]}',
        'parameters': f'{sum(found["parameters"].values()):,} ('
        + ', '.join(f'{part} {count:,}' for part, count in found['parameters'].items() if count)
        + ')',
        'training': f'{get("train.tokens_per_step")} tokens a step in windows of {get("train.context_length")}, '
        f'peak learning rate {get("optimizer.peak_learning_rate")}, seed {get("train.seed")}',
        'data': f'{get("data.path")}, fingerprint {_short(found["fingerprints"]["data"])}',
        'tokenizer': _short(found['fingerprints']['tokenizer']),
        'machine': f'{info.get("device_count")} × {info.get("device_kind")}, {info.get("process_count")} process'
        + ('es' if info.get('process_count') != 1 else ''),
        'code': f'{info.get("git_commit") or "no git commit"}, lm {info.get("versions", {}).get("lm")}, '
        f'jax {info.get("versions", {}).get("jax")}',
        'last step': '–'
        if train is None
        else f'{train["step"]:,}: loss {train["loss"]:.4f}, perplexity {perplexity(train["loss"]):.2f}, '
        f'gradient norm {train["grad_norm"]:.3f}, {si(found["tokens_per_second"] or 0)} tokens/s'
        + (f', MFU {train["mfu"]:.1%}' if train.get('mfu') else '')
        + f', {duration(train["seconds"])} of training'
        + (f', {train["skipped_steps"]} steps skipped' if train.get('skipped_steps') else ''),
        'goodput': describe(found['goodput']) if found['goodput'] else '–',
        'last evaluation': '–'
        if evaluation is None
        else f'{evaluation["step"]:,}: {evaluation["split"]} '
        + ', '.join(f'{m.replace("_", " ")} {evaluation[m]:.4f}' for m in MEASURES if m in evaluation),
        'evaluations': f'{found["evaluations"]} of lm evaluate',
    }
    console.print(_pairs(rows))
    table = _table('step', 'size', 'saved', 'evaluation loss', 'health')
    for checkpoint in found['checkpoints']:
        loss = checkpoint['loss']
        table.add_row(
            f'{checkpoint["step"]:,}',
            f'{si(checkpoint["bytes"])}B',
            checkpoint['saved'] or '–',
            f'{loss:.4f}' if isinstance(loss, float) else '–',
            checkpoint['health'],
        )
    console.print(table if found['checkpoints'] else 'no checkpoints yet')
    if found['set_aside']:
        console.print(f'set aside or unfinished: {", ".join(found["set_aside"])}')


def print_store(found: dict[str, Any], console: 'Console') -> None:
    """The store for people."""

    def pairs(value: Any) -> str:
        return ', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else str(value)

    rows = {'token store': found['path']}
    rows |= {k: pairs(v) for k, v in found.items() if k not in ('kind', 'path', 'splits', 'settings', 'damage')}
    console.print(_pairs(rows))
    table = _table('split', 'documents', 'bytes', 'words', 'tokens', 'bytes/token', 'health')
    for name, split in found['splits'].items():
        table.add_row(
            name,
            *(f'{split[column]:,}' for column in ('documents', 'bytes', 'words', 'tokens')),
            '–' if split['bytes_per_token'] is None else f'{split["bytes_per_token"]:.3f}',
            split['health'],
        )
    console.print(table)


def print_sweep(found: dict[str, Any], console: 'Console') -> None:
    """The table with which `lm sweep` ended."""
    from lm.sweep.command import results_table

    console.print(results_table(found['points']))


def _pairs(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return '\n'.join(f'{name:<{width}}  {value}' for name, value in rows.items())


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table()
    for heading in headings:
        left = heading in ('saved', 'health', 'split')
        table.add_column(heading, justify='left' if left else 'right')
    return table


def _short(digest: str | None) -> str:
    return digest[:16] if digest else '–'
