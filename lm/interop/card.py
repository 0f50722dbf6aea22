"""The model card of an export: README.md."""

import json
import pathlib

from lm.data.store import TokenStore
from lm.errors import writing
from lm.inference.loaded_run import LoadedRun
from lm.runs.records import Run
from lm.secrets import redact

CARD = 'README.md'

USES = {
    'safetensors': """`lm import DIR --run_dir runs/imported` makes a run of these files.""",
    'huggingface': """```python
import transformers

model = transformers.AutoModelForCausalLM.from_pretrained('.', trust_remote_code=True)  # the folder of this file
```""",
    'native': """```python
{imports}import transformers

model = transformers.AutoModelForCausalLM.from_pretrained('.')  # the folder of this file
```""",
}
"""Format → how its files are used."""
LICENCE = """This card states no licence of the weights. Who publishes them decides on it, and the licences of the data
and of an imported checkpoint count. Code files in this folder are of lm and under the Apache License 2.0."""


def write_card(run: LoadedRun, folder: pathlib.Path, format_name: str, dtype: str, imports: str = '') -> None:
    """Writes README.md; `imports` is a line of Python before the others. Raises LmError where that fails."""
    with writing(folder / CARD):
        (folder / CARD).write_text(describe_model(run, format_name, dtype, imports))


def describe_model(run: LoadedRun, format_name: str, dtype: str, imports: str = '') -> str:
    """Returns the card as Markdown: model, data, tokens, perplexity, command and licence."""
    record, model, train = Run.read(run.directory.path), run.experiment.model, run.experiment.train
    library = 'lm' if format_name == 'safetensors' else 'transformers'
    sections = {
        'Model': [
            f'{record.info.get("parameters", 0):,} parameters in {dtype}; attention: {record.attention}.',
            f'{model.n_layers} layers of width {model.d_model}, {model.vocab_size:,} tokens in the vocabulary, '
            f'contexts of {train.context_length:,} tokens. `config.gin` has all settings.',
        ],
        'Data': describe_data(run, record),
        'Training': describe_training(run, record),
        'Perplexity': describe_figures(run, record),
        'Use': [USES[format_name].format(imports=imports)],
        'Licence': [LICENCE],
    }
    body = '\n\n'.join('\n\n'.join([f'## {title}', *parts]) for title, parts in sections.items())
    return f'---\nlibrary_name: {library}\npipeline_tag: text-generation\n---\n\n# {record.name}\n\n{body}\n'


def describe_data(run: LoadedRun, record: Run) -> list[str]:
    """Returns sentences on the data."""
    store = run.store
    if isinstance(store, TokenStore):
        source = json.dumps(store.info.get('source'), ensure_ascii=False)
        counts = ', '.join(f'{store.tokens(split):,} of {split}' for split in store.splits)
        return [f'Source: `{source}`.', f'Tokens: {counts}. Fingerprint of the data: `{store.fingerprint}`.']
    if run.experiment.data.mixture:
        shares = ', '.join(f'`{path}`' for path, _ in run.experiment.data.mixture)
        return [f'A mixture of the token stores {shares}; `config.gin` has their shares.']
    if run.experiment.data.task is not None:
        return [f'A synthetic task: `@{run.experiment.data.task.gin_name}()`.']
    return [f'These weights come from `{record.imported}`, whose data this run does not know.']


def describe_training(run: LoadedRun, record: Run) -> list[str]:
    """Returns sentences on the steps, the tokens and the command."""
    if record.imported is not None and run.step == 0:
        return [f'The weights are imported from `{record.imported}`. They were not trained further.']
    train = run.experiment.train
    command = redact(record.info.get('command') or '')
    said = [f'{run.step:,} steps of {train.tokens_per_step:,} tokens: {run.step * train.tokens_per_step:,} in all.']
    return said + ([f'```\n{command}\n```'] if command else [])


def describe_figures(run: LoadedRun, record: Run) -> list[str]:
    """Returns a table of the evaluations at the step of the weights."""
    found = [one for one in [*record.evals, *record.evaluations] if one.get('step') == run.step and 'perplexity' in one]
    if not found:
        return ['The weights of this step were not evaluated; `lm evaluate` does so.']
    rows = ['| split | context | tokens | perplexity per token | bits per byte |', '|---|---:|---:|---:|---:|']
    for one in found:
        bits = f'{one["bits_per_byte"]:.4f}' if 'bits_per_byte' in one else ''
        length = one.get('context_length', run.experiment.train.context_length)
        split = one.get('split', run.experiment.data.eval_split)
        rows.append(f'| {split} | {length:,} | {one["tokens"]:,} | {one["perplexity"]:.4f} | {bits} |')
    return ['\n'.join(dict.fromkeys(rows))]
