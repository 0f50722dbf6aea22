"""Words that people search for: the site's index, to which its search answers first."""

import re

TOPICS = {
    'how_to/train.md': {
        'One command trains and resumes': ('resume', 'continue a run', 'interrupt', 'stop a run'),
        'Batches, memory and devices': ('memory', 'out of memory', 'batch size', 'several GPUs', 'devices'),
        'Options of the optimizer and the model': ('optimizer', 'muon', 'weight decay'),
        'When a run diverges': ('divergence', 'NaN', 'loss spike', 'rewind'),
        'Branch from a run': ('branch', 'train longer'),
        'Tell others about a run': ('tensorboard', 'wandb', 'webhook', 'trackers'),
    },
    'how_to/evaluate.md': {'Evaluate a run': ('perplexity', 'evaluate', 'bits per byte')},
    'how_to/weights.md': {'Export': ('export', 'transformers'), 'Import': ('import', 'checkpoints of others', 'GGUF')},
    'how_to/sweep.md': {'Sweeps': ('sweep', 'grid', 'hyperparameters')},
    'tutorials/first_run.md': {'A first run': ('quickstart',), 'Install it elsewhere': ('install', 'GPU')},
    'tutorials/pod.md': {'A pod from nothing': ('TPU', 'pod'), '5. Train': ('preemption', 'spot')},
    'long_context.md': {'Long windows, documents and decay': ('context length', 'long context')},
    'check.md': {'`lm check`: what a run needs, before it is paid for': ('does it fit', 'price', 'topology')},
    'faults.md': {'Faults': ('checkpoint', 'corruption'), 'Wrong chips': ('silent data corruption',)},
    'storage.md': {'Buckets': ('gs://', 's3://')},
}
"""Page → heading → words. Words of gin names need no entry here."""


def add_entries(page: str, text: str) -> str:
    """Puts the words of TOPICS behind the headings of a page."""
    for heading, words in TOPICS.get(page, {}).items():
        text, count = re.subn(rf'^#+ {re.escape(heading)}$', rf'\g<0>\n\n{index(words)}', text, flags=re.MULTILINE)
        assert count == 1, f'{page} has {count} headings {heading!r}: change docs/extensions/lm_reference/topics.py'
    return text


def index(entries: tuple[str, ...]) -> str:
    """Main entries of the index, which Sphinx's search ranks before titles and texts."""
    return f'```{{index}} {", ".join(f"! {entry}" for entry in entries)}\n```'
