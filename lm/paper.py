"""What PolySketchFormer measured: Tables 2, 3 and 4 (Appendix E), and which of their rows a run is a repetition of.

The paper's models: GPT-2 small style, 12 layers (13 for kernel-based ones), 125k steps of 1M tokens, perplexity on the
test split; Table 4: training steps of 1M tokens per second.
"""

import dataclasses

from lm.records import Run

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
SOFTMAX = 'Softmax (using FlashAttention)'
PERFORMER = 'Performer (2048 features)'


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """One table.

    Attributes:
        title: number and contents.
        unit: what the values are.
        groups: heading → the rows below it, in the paper's order; each row has a value a context, None: out of memory.
    """

    title: str
    unit: str
    groups: dict[str, dict[str, tuple[float | None, ...]]]


def _table(title: str, unit: str, text: str) -> PaperTable:
    groups: dict[str, dict[str, tuple[float | None, ...]]] = {}
    for line in text.strip().splitlines():
        label, bar, values = (part.strip() for part in line.partition('|'))
        if not bar:
            rows = groups.setdefault(label, {})
        else:
            rows[label] = tuple(None if value == 'OOM' else float(value) for value in values.split())
    return PaperTable(title, unit, groups)


PG19 = _table(
    'Table 2: PG-19',
    'test perplexity',
    """
Non-kernel based methods, 12 layers
Softmax (using FlashAttention)       | 13.57 12.75 12.23 11.88 11.65 11.57 11.55
Polynomial (deg=2)                   | 13.84 13.10 12.75 12.61 12.72 OOM OOM
Polynomial (deg=4)                   | 13.58 12.76 12.26 12.00 11.85 OOM OOM
Polynomial (deg=8)                   | 13.56 12.71 12.16 11.86 11.64 OOM OOM
Kernel based methods, 13 layers
Polysketch (random, r = 32)          | 14.31 13.74 13.40 13.26 13.41 13.79 14.75
Polysketch (random, r = 64)          | 14.00 13.35 13.03 12.84 12.92 13.18 13.66
Polysketch (learned, r = 32)         | 13.49 12.74 12.34 12.16 12.21 12.40 12.79
Polysketch (learned, r = 64)         | 13.33 12.60 12.10 11.90 11.86 11.94 12.19
Polysketch (random + local, r = 32)  | 13.37 12.58 12.23 12.01 11.95 11.90 12.16
Polysketch (random + local, r = 64)  | 13.37 12.58 12.24 11.98 11.93 11.96 11.91
Polysketch (learned + local, r = 32) | 13.37 12.58 12.09 11.75 11.55 11.46 11.47
Polysketch (learned + local, r = 64) | 13.37 12.58 12.03 11.69 11.44 11.38 11.34
Performer (2048 features)            | 14.30 13.68 13.56 13.50 13.49 13.73 14.17
""",
)

WIKI40B = _table(
    'Table 3: Wiki-40B',
    'test perplexity',
    """
Non-kernel based methods, 12 layers
Softmax (using FlashAttention)       | 15.82 15.04 14.61 14.40 14.35 14.34 14.35
Polynomial (deg=2)                   | 16.24 15.58 15.38 15.41 15.60 OOM OOM
Polynomial (deg=4)                   | 15.85 15.11 14.75 14.59 14.59 OOM OOM
Polynomial (deg=8)                   | 15.81 15.00 14.56 14.36 14.32 OOM OOM
Kernel based methods, 13 layers
Polysketch (random, r = 32)          | 16.84 16.35 16.20 16.28 16.52 17.05 17.84
Polysketch (random, r = 64)          | 16.32 15.73 15.72 15.88 16.01 16.44 17.45
Polysketch (learned, r = 32)         | 15.84 15.20 14.95 14.91 15.06 15.52 15.93
Polysketch (learned, r = 64)         | 15.65 14.96 14.62 14.58 14.70 14.95 15.35
Polysketch (random + local, r = 32)  | 15.63 14.86 14.60 14.50 14.52 14.65 14.68
Polysketch (random + local, r = 64)  | 15.63 14.86 14.58 14.52 14.43 14.62 14.54
Polysketch (learned + local, r = 32) | 15.63 14.86 14.46 14.28 14.24 14.23 14.32
Polysketch (learned + local, r = 64) | 15.63 14.86 14.43 14.26 14.18 14.24 14.29
Performer (2048 features)            | 16.75 16.18 16.14 16.37 16.64 17.16 18.40
""",
)

SPEED = _table(
    'Table 4: training speed (softmax: FlashAttention with blocks of 512)',
    'steps of 1M tokens per second',
    """
Non-kernel based methods, 12 layers
Softmax (using FlashAttention)       | 5.46 5.0 4.4 3.65 2.7 1.8 1.03
Polynomial (deg=2)                   | 5.74 4.74 3.55 2.16 1.20 OOM OOM
Polynomial (deg=4)                   | 5.74 4.74 3.55 2.16 1.20 OOM OOM
Polynomial (deg=8)                   | 5.74 4.74 3.55 2.16 1.20 OOM OOM
Kernel based methods, 13 layers
Polysketch (random, r = 32)          | 5.25 4.31 3.66 3.54 3.39 3.25 2.56
Polysketch (random, r = 64)          | 5.06 4.20 2.50 2.23 2.06 1.95 1.55
Polysketch (learned, r = 32)         | 3.16 2.82 2.45 2.40 2.33 2.26 2.00
Polysketch (learned, r = 64)         | 2.17 1.97 1.37 1.35 1.33 1.29 1.13
Polysketch (random + local, r = 32)  | 5.35 4.40 3.24 3.2 3.14 3.11 2.71
Polysketch (random + local, r = 64)  | 5.35 4.40 2.09 2.00 1.91 1.82 1.60
Polysketch (learned + local, r = 32) | 5.35 4.40 2.27 2.27 2.20 2.19 1.98
Polysketch (learned + local, r = 64) | 5.35 4.40 1.31 1.31 1.30 1.26 1.12
Performer (2048 features)            | 2.21 1.58 1.39 1.36 1.33 1.32 1.18
""",
)

TABLES = {'pg19': PG19, 'wiki40b': WIKI40B}


def table_of(run: Run) -> str | None:
    """The key in TABLES of the data that a run was trained on, by the name of its store or its source."""
    hints = ' '.join(run.config.get(name, '') for name in ('data.path', 'tfds.name', 'text_files.path', 'jsonl.path'))
    hints = hints.lower().replace('-', '').replace('_', '')
    return next((key for key in TABLES if key in hints), None)


def row_of(run: Run) -> str | None:
    """The row of the tables whose attention a run has, as the paper prints it; None for all others."""
    label = label_of(run)
    return label if any(label in rows for rows in PG19.groups.values()) else None


def label_of(run: Run) -> str | None:
    """The attention of a run in the paper's words, for the mechanisms that the paper has, of any size."""
    if len(run.mechanisms()) != 1:
        return None
    (name,) = run.mechanisms()

    def value(field: str):
        return run.value(f'{name}.{field}')

    match name.rpartition('/')[2]:
        case 'softmax' if value('window') is None:
            return SOFTMAX
        case 'polynomial':
            return f'Polynomial (deg={value("degree")})'
        case 'polysketch' if value('degree') == 4 and not value('per_head'):
            kind = {'gaussian': 'random', 'learned': 'learned'}.get(value('sketch'), value('sketch'))
            return f'Polysketch ({kind}{" + local" if value("local") else ""}, r = {value("sketch_size")})'
        case 'performer' if value('features') == 'positive':
            return f'Performer ({value("n_features")} features)'
    return None
