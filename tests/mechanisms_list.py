"""Every mechanism in each form that the model must support, with blocks and windows short enough for length 20.

A mechanism without a form here uses its defaults, so a new file is tested without an entry.
"""

import pytest

from lm.attention import mechanisms
from lm.attention.hybrid import Hybrid
from lm.attention.llops import Llops
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.attention.window_linear import WindowLinear

FORMS = {
    'softmax': Softmax(),
    'softmax window': Softmax(window=5),
    'polynomial 2': Polynomial(degree=2),
    'polynomial 4': Polynomial(degree=4),
    'polynomial 8': Polynomial(degree=8),
    'polysketch learned local': Polysketch(sketch='learned', sketch_size=8, block=8),
    'polysketch learned': Polysketch(sketch='learned', sketch_size=8, block=8, local=False),
    'polysketch gaussian local': Polysketch(sketch='gaussian', sketch_size=8, block=8),
    'polysketch srht per head': Polysketch(sketch='srht', sketch_size=8, local=False, per_head=True),
    'performer': Performer(n_features=32, block=8),
    'performer relu': Performer(n_features=32, block=8, features='relu'),
    'llops': Llops(n_features=16),
    'taylor': Taylor(feature_dim=4),
    'based': (Taylor(feature_dim=4), Softmax(window=5)),
    'hybrid': Hybrid(window=5),
    'retention': Retention(),
    'gated_linear': GatedLinear(),
    'gated_linear ssd': GatedLinear(gate='ssd', degree=2),
    'gated_linear channel': GatedLinear(gate='channel'),
    'delta': Delta(),
    'delta gate': Delta(gate=True, negative=True),
    'delta channel': Delta(gate='channel', negative=True),
    'polysketch gate': Polysketch(sketch_size=8, block=8, gate=True),
    'polynomial gate': Polynomial(degree=4, gate=True),
    'softmax gate': Softmax(window=7, gate=True),
}

KNOWN = {type(one) for form in FORMS.values() for one in (form if isinstance(form, tuple) else (form,))}
OTHERS = {name: mechanism() for name, mechanism in mechanisms().items() if mechanism not in KNOWN}
OTHERS |= {'softmax sinks': Softmax(window=7, sinks=True, score_cap=3.0, log_base=4.0)}
OTHERS |= {'window_linear': WindowLinear(window=5)}
MECHANISMS = FORMS | OTHERS

QUICK = (
    'softmax window',
    'softmax sinks',
    'polynomial 4',
    'polysketch learned local',
    'performer',
    'hybrid',
    'gated_linear',
    'delta gate',
)
"""One form per way to compute. A slow test, whose property must hold for all forms, runs on these forms by default."""
QUICK_FIRST = [
    pytest.param(form, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, form in MECHANISMS.items()
]
"""All forms, as parameters of a test; forms outside `QUICK` are marked slow."""
