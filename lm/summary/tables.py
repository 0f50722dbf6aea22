"""The tables of `lm inspect`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from lm.runs import sweep_file
from lm.runs.goodput import describe
from lm.runs.info import starts_left_out
from lm.text import format_count, format_duration, format_si, make_table, make_visible, perplexity


def print_run(found: Mapping[str, Any], console: Console) -> None:
    """Prints the run for people."""
    get, info = found['configuration'].get, found['info']
    train, evaluation = found['last_train'], found['last_eval']
    steps, idle, trained, branch = (
        found['steps'],
        found['idle_parameters'],
        found['trained_parameters'],
        info.get('branch'),
    )
    resumed = len(info.get('resumed', [])) + starts_left_out(info)
    rows = {
        'run': found['path'],
        'status': f'imported from {info["imported"]}, not trained'
        if found['status'] == 'imported'
        else f'{found["status"]}, step {found["step"]:,} of {steps:,} ({found["step"] / max(steps, 1):.0%})',
        'started': ', resumed '.join([str(info.get('started')), *info.get('resumed', [])[-1:]])
        + (f' ({resumed} times in all)' if resumed > 1 else ''),
        **({'branch of': f'{branch["from"]} at step {branch["step"]:,}'} if branch else {}),
        'model': f'{_counted(get("model.n_layers"), "layer")} of width {get("model.d_model")}, '
        f'{_counted(get("model.n_heads"), "head")} of {get("model.head_dim")}, {found["attention"]}',
        'parameters': f'{sum(found["parameters"].values()):,} ('
        + ', '.join(f'{part} {count:,}' for part, count in found['parameters'].items() if count)
        + ')'
        + (f'; {sum(found["parameters"].values()) - idle:,} of them per token' if idle else '')
        + (f'; {trained:,} trained' if isinstance(trained, int) else ''),
        'training': f'{get("train.tokens_per_step")} tokens per step in windows of {get("train.context_length")}, '
        f'peak learning rate {get("optimizer.peak_learning_rate")}, seed {get("train.seed")}',
        'data': f'{data_of(found["configuration"])}, fingerprint {_short(found["fingerprints"]["data"])}',
        'tokenizer': _short(found['fingerprints']['tokenizer']),
        'machine': f'{info.get("device_count")} × {info.get("device_kind")}, '
        + _counted(info.get('process_count'), 'process', 'processes'),
        'code': f'{info.get("git_commit") or "no git commit"}, lm {info.get("versions", {}).get("lm")}, '
        f'jax {info.get("versions", {}).get("jax")}',
        'last line': '–'
        if train is None
        else f'{train["step"]:,}: loss {train["loss"]:.4f}, perplexity {perplexity(train["loss"]):.2f}, '
        f'gradient norm {train["grad_norm"]:.3f}, {format_si(found["tokens_per_second"] or 0)} tokens/s'
        + (f', MFU {train["mfu"]:.1%}' if train.get('mfu') else '')
        + f', {format_duration(train["seconds"])} of training'
        + (f', {format_count(train["skipped_steps"], "step")} skipped' if train.get('skipped_steps') else '')
        + (f', {format_count(train["kept_numbers"], "number")} not updated' if train.get('kept_numbers') else ''),
        **({} if train is None else _describe_routers(train)),
        'goodput': describe(found['goodput']) if found['goodput'] else '–',
        'last evaluation': '–'
        if evaluation is None
        else f'{evaluation["step"]:,}: {evaluation["split"]} '
        + ', '.join(f'{m.replace("_", " ")} {evaluation[m]:.4f}' for m in sweep_file.MEASURES if m in evaluation)
        + ''.join(f', {m.replace("/", " of ")} {v:.4f}' for m, v in evaluation.items() if m.startswith('perplexity/')),
        'evaluations': f'{found["evaluations"]} of lm evaluate',
    }
    console.print(_pairs(rows))
    checkpoints = [
        (
            f'{one["step"]:,}',
            f'{format_si(one["bytes"])}B',
            one['saved'] or '–',
            f'{one["loss"]:.4f}' if isinstance(one['loss'], float) else '–',
            make_visible(one['health']),
        )
        for one in found['checkpoints']
    ]
    table = make_table(('step', 'size', 'saved', 'evaluation loss', 'health'), checkpoints, left=('saved', 'health'))
    console.print(table if checkpoints else 'no checkpoints yet')
    if found['set_aside']:
        console.print(f'set aside or unfinished: {", ".join(map(make_visible, found["set_aside"]))}')


def print_store(found: Mapping[str, Any], console: Console) -> None:
    """Prints the store for people."""

    def pairs(value: Any) -> str:
        return ', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else str(value)

    rows = {'token store': found['path']}
    rows |= {k: pairs(v) for k, v in found.items() if k not in ('kind', 'path', 'splits', 'settings', 'damage')}
    console.print(_pairs(rows))
    counts = 'documents', 'bytes', 'words', 'tokens'
    splits = [
        (
            name,
            *(f'{split[column]:,}' for column in counts),
            '–' if split['bytes_per_token'] is None else f'{split["bytes_per_token"]:.3f}',
            split['health'],
        )
        for name, split in found['splits'].items()
    ]
    console.print(make_table(('split', *counts, 'bytes/token', 'health'), splits, left=('split', 'health')))


def print_sweep(found: Mapping[str, Any], console: Console) -> None:
    """Prints the table with which `lm sweep` ended."""
    sweep_file.print_results(found['points'])


def data_of(config: Mapping[str, str]) -> str:
    """Returns the task, or the store or mixture that a run learns; an import may have none of them."""
    task, path, stores = (config.get(f'data.{name}') for name in ('task', 'path', 'mixture'))
    if task not in (None, 'None'):
        return task
    found = [text for text in (path, stores) if text not in (None, 'None', "''", '[]', '{}')]
    return ' '.join(found) or '–'


def _pairs(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return '\n'.join(f'{name:<{width}}  {make_visible(value)}' for name, value in rows.items())


def _counted(number: Any, noun: str, plural: str | None = None) -> str:
    """Returns a number from a file with its noun. The number may be text or missing."""
    return format_count(int(number), noun, plural) if str(number).isdecimal() else f'{number} {plural or f"{noun}s"}'


def _short(digest: str | None) -> str:
    return digest[:16] if digest else '–'


def _describe_routers(train: Mapping[str, Any]) -> dict[str, str]:
    """Returns the row of a run with experts."""
    if not all(name in train for name in ('balance_loss', 'expert_load_max', 'expert_load_layer', 'idle_experts')):
        return {}
    return {
        'experts': f'balance loss {train["balance_loss"]:.3f} (1 is even), the busiest expert gets '
        f'{train["expert_load_max"]:.0%} of the tokens (layer {train["expert_load_layer"]}), '
        f'{format_count(train["idle_experts"], "expert")} without a token'
    }
