"""Numbers as people read them."""

import math


def perplexity(nats: float) -> float:
    """exp(nats), without an overflow error."""
    return math.exp(nats) if nats < 700 else math.inf


def si(value: float) -> str:
    """1234567 → '1.23M'."""
    for limit, suffix in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= limit:
            return f'{value / limit:.3g}{suffix}'
    return f'{value:.3g}'


def duration(seconds: float) -> str:
    """Seconds → '2d03h', '1h05m', '4m09s' or '12s'."""
    s = round(seconds)
    if s >= 86_400:
        return f'{s // 86_400}d{s % 86_400 // 3600:02}h'
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02}m'
    return f'{s // 60}m{s % 60:02}s' if s >= 60 else f'{s}s'
