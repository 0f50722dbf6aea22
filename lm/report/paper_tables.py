"""What the papers measured, table by table, as they print it. `lm.report.paper` says which runs repeat which cell.

PolySketchFormer: Tables 1 to 6 and App. F.2, G; its first draft: Tables 1 and 2; LLoPS: Tables 4 and 5.
"""

import dataclasses

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
SOFTMAX = 'Softmax (using FlashAttention)'
SMALL = {'model.d_model': 768, 'train.tokens_per_step': 2**20}
STEPS = {'train.steps': 125_000}
SYNTHETIC = {'model.d_model': 128, 'model.n_heads': 8}


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """One table.

    Attributes:
        title: number and contents.
        unit: what the values are.
        measure: perplexity, accuracy (in percent) or steps_per_second.
        axis: what the columns are.
        columns: their values, such as context lengths.
        groups: heading → the rows below it, in the paper's order; each row has a value a column, None: there is none.
        absent: what the paper prints where there is none.
        settings: binding → value, of all its runs; layers stand in the headings and rows.
    """

    title: str
    unit: str
    measure: str
    axis: str
    columns: tuple[int, ...]
    groups: dict[str, dict[str, tuple[float | None, ...]]]
    absent: str
    settings: dict[str, int]

    def value(self, group: str, row: str, column: int) -> float | None:
        return self.groups[group][row][self.columns.index(column)]


def _table(
    title: str,
    unit: str,
    measure: str,
    columns: tuple[int, ...],
    text: str,
    axis: str = 'context',
    absent: str = 'OOM',
    settings: dict[str, int] | None = None,
) -> PaperTable:
    groups: dict[str, dict[str, tuple[float | None, ...]]] = {}
    for line in text.strip().splitlines():
        label, bar, values = (part.strip() for part in line.partition('|'))
        if not bar:
            rows = groups.setdefault(label, {})
        else:
            rows[label] = tuple(None if value == absent else float(value) for value in values.split())
    return PaperTable(title, unit, measure, axis, columns, groups, absent, settings or {})


PG19 = _table(
    'Table 2: PG-19',
    'test perplexity',
    'perplexity',
    CONTEXTS,
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
    settings=SMALL | STEPS,
)

WIKI40B = _table(
    'Table 3: Wiki-40B',
    'test perplexity',
    'perplexity',
    CONTEXTS,
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
    settings=SMALL | STEPS,
)

SPEED = _table(
    'Table 4: training speed (softmax: FlashAttention with blocks of 512)',
    'steps of 1M tokens per second',
    'steps_per_second',
    CONTEXTS,
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
    settings=SMALL,
)

C4 = _table(
    'Tables 6 (30k steps) and 1 (125k steps): C4',
    'validation perplexity',
    'perplexity',
    (30_000, 125_000),
    """
GPT-2 Small style, 12 layers, context 8192
Softmax                                         | 20.11 17.81
Polynomial (degree 4)                           | 20.66 18.18
Polynomial (degree 8)                           | 20.05 17.77
Polysketch (learned, r = 64)                    | 21.16 18.79
Polysketch (learned, 13 layers, r = 64)         | 20.93 18.47
Polysketch (learned + local, r = 64)            | 20.30 17.98
Polysketch (learned + local, 13 layers, r = 64) | 19.91 17.68
Polysketch (learned, r = 32)                    | 22.31 19.09
Polysketch (learned, 13 layers, r = 32)         | 22.15 19.50
Polysketch (learned + local, r = 32)            | 20.28 18.04
Polysketch (learned + local, 13 layers, r = 32) | 19.94 17.72
GPT-2 Medium style, 24 layers, context 8192
Softmax                                         | 15.97 13.98
Polynomial (degree 4)                           | 16.46 14.29
Polynomial (degree 8)                           | 16.12 14.14
Polysketch (learned, r = 64)                    | 17.18 14.64
Polysketch (learned, 26 layers, r = 64)         | 17.06 14.49
Polysketch (learned + local, r = 64)            | 16.14 14.16
Polysketch (learned + local, 26 layers, r = 64) | 15.95 13.98
Polysketch (learned, r = 32)                    | 17.81 14.94
Polysketch (learned, 26 layers, r = 32)         | 17.47 14.73
Polysketch (learned + local, r = 32)            | 16.20 14.15
Polysketch (learned + local, 26 layers, r = 32) | 16.02 14.00
GPT-2 Large style, 36 layers, context 2048
Softmax                                         | – 12.71
Polynomial (degree 4)                           | – 12.82
Polynomial (degree 8)                           | – 12.85
Polysketch (learned, 39 layers, r = 64)         | – 12.83
Polysketch (learned + local, 39 layers, r = 64) | – 12.70
Polysketch (learned, 39 layers, r = 32)         | – 12.98
Polysketch (learned + local, 39 layers, r = 32) | – 12.74
""",
    axis='steps',
    absent='–',
    settings={'train.tokens_per_step': 2**19},
)

C4_SPEED = _table(
    'App. G: training speed (softmax without FlashAttention)',
    'steps of 0.5M tokens per second',
    'steps_per_second',
    (8192,),
    """
GPT-2 Small style, 12 layers, context 8192
Softmax                                         | 2.40
Polynomial (degree 4)                           | 2.65
Polynomial (degree 8)                           | 2.65
Polysketch (learned, r = 64)                    | 2.71
Polysketch (learned, 13 layers, r = 64)         | 2.49
Polysketch (learned + local, r = 64)            | 2.70
Polysketch (learned + local, 13 layers, r = 64) | 2.48
Polysketch (learned, r = 32)                    | 4.68
Polysketch (learned, 13 layers, r = 32)         | 4.34
Polysketch (learned + local, r = 32)            | 4.42
Polysketch (learned + local, 13 layers, r = 32) | 4.12
GPT-2 Medium style, 24 layers, context 8192
Softmax                                         | 0.87
Polynomial (degree 4)                           | 0.89
Polynomial (degree 8)                           | 0.89
Polysketch (learned, r = 64)                    | 0.99
Polysketch (learned, 26 layers, r = 64)         | 0.92
Polysketch (learned + local, r = 64)            | 0.98
Polysketch (learned + local, 26 layers, r = 64) | 0.91
Polysketch (learned, r = 32)                    | 1.62
Polysketch (learned, 26 layers, r = 32)         | 1.52
Polysketch (learned + local, r = 32)            | 1.59
Polysketch (learned + local, 26 layers, r = 32) | 1.46
""",
    settings={'train.tokens_per_step': 2**19},
)

COPYING = _table(
    'Table 5: selective copying',
    '% of 4096 examples without a mistake',
    'accuracy',
    (4096, 16_384, 32_768),
    """
2 layers of 8 heads of 16
Softmax                                                      | 99.73 98.17 0
Polynomial (degree=4)                                        | 99.90 97.97 0
Polynomial (degree=8)                                        | 99.90 97.65 0
Polysketch (learned + local)                                 | 99.16 92.75 0
Polysketch (learned + local, different learning rate schedule) | - 99.44 87.16
""",
    absent='-',
    settings=SYNTHETIC | {'train.steps': 400_000},
)

INDUCTION = _table(
    'App. F.2: induction heads (context 128: more than 99.95 %; 256: "around 1/16")',
    '% of the examples',
    'accuracy',
    (128, 256),
    """
2 layers of 8 heads of 16
Softmax               | 99.95 6.25
Polynomial (degree=4) | 99.95 6.25
Polynomial (degree=8) | 99.95 6.25
Polysketch (r = 16)   | 99.95 6.25
Polysketch (r = 32)   | 99.95 6.25
""",
    settings=SYNTHETIC | {'train.steps': 400_000},
)

RECALL = _table(
    'LLoPS Tables 4 and 5: associative recall (256 features)',
    '% of the queries',
    'accuracy',
    (128, 192),
    """
2 layers
BASED         | 91.9 98.1
LLoPS (p = 2) | 88.7 –
LLoPS (p = 4) | 93.2 99.0
LLoPS (p = 6) | 86.6 –
""",
    axis='width',
    absent='–',
)

DRAFT_CONTEXTS = CONTEXTS[:-1]

DRAFT_WIKI40B = _table(
    'First draft, Table 1: Wiki-40B',
    'perplexity on the eval split',
    'perplexity',
    DRAFT_CONTEXTS,
    """
12 layers
Softmax    | 16.5 16.0 15.6 15.2 - -
Polynomial | 16.6 16.2 15.6 15.4 - -
Polysketch | 18.2 17.6 17.2 17.6 18.2 17.7
""",
    absent='-',
    settings={'model.d_model': 768} | STEPS,
)

DRAFT_PG19 = _table(
    'First draft, Table 1: PG-19',
    'perplexity on the eval split',
    'perplexity',
    DRAFT_CONTEXTS,
    """
12 layers
Softmax    | 15.5 14.5 14.5 12.8 - -
Polynomial | 15.6 14.9 14.6 13.1 - -
Polysketch | 16.5 17.6 16.2 14.8 15.4 15.8
""",
    absent='-',
    settings={'model.d_model': 768} | STEPS,
)

DRAFT_SPEED = _table(
    'First draft, Table 2: training speed on 32 A100',
    'steps per second, of 128k tokens to context 4k, 256k at 8k, 512k at 16k',
    'steps_per_second',
    DRAFT_CONTEXTS,
    """
12 layers
Softmax        | 6.25 4.5 4.3 3 OOM OOM
Polynomial     | 6.2 4.5 4.1 3.2 OOM OOM
Polysketch     | 3.7 3.4 3.3 3.1 2 1.1
Performer      | 2.3 2.4 1.8 1.2 0.7 0.35
FlashAttention | 5.8 5.3 4.7 3.5 1.4 0.44
""",
    settings={'model.d_model': 768},
)

TABLES = {
    'pg19': PG19,
    'wiki40b': WIKI40B,
    'speed': SPEED,
    'c4': C4,
    'c4_speed': C4_SPEED,
    'copying': COPYING,
    'induction': INDUCTION,
    'recall': RECALL,
    'draft_wiki40b': DRAFT_WIKI40B,
    'draft_pg19': DRAFT_PG19,
    'draft_speed': DRAFT_SPEED,
}
