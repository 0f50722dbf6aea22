"""The trials of a search, as Optuna sees them: a pure function of the run directories.

Trial n is drawn from the results of the trials 0 to n − `parallel`, by a sampler whose seed depends on n. So it does
not matter when a process dies, or which machine is faster. Whether a trial is pruned depends on the same results and on
its own evaluations. Hyperband (Li et al., arXiv 1603.06560) compares it with other trials of its bracket.

Only this module uses Optuna's studies. Each question gets a study of its own in memory, which holds what the trial
may know.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from lm.errors import Diverged
from lm.sweep.options import SearchOptions
from lm.sweep.search.distributions import Distribution, Drawn

REDUCTION = 3
"""Hyperband keeps one of so many trials at each of its levels."""
LEVELS = 3
"""Levels below the whole length: the lowest is a 27th of the steps."""


class TrialResult(NamedTuple):
    """The state of a trial, read from its run directory.

    Attributes:
        values: by key, in Optuna's form.
        losses: (step, loss) of the evaluations.
        is_finished: the last step is done.
        failed_with: the exit code of a failure, which is not tried again; None: there is none.
    """

    values: Mapping[str, Drawn]
    losses: Sequence[tuple[int, float]]
    is_finished: bool
    failed_with: int | None = None


def find_pruned_step(trial: FrozenTrial) -> int | None:
    """Returns the step at which a trial was pruned; None: it was not."""
    return trial.last_step if trial.state.name == 'PRUNED' else None


class Study:
    """Draws the values of trials, and decides which ones end early.

    Args:
        distributions: of the searched parameters, by key.
        read: returns the result of a trial that has begun, or has failed; None: it has not begun.
        steps, every: of a training: how many, and between two evaluations.
    """

    def __init__(
        self,
        distributions: Mapping[str, Distribution],
        options: SearchOptions,
        read: Callable[[int], TrialResult | None],
        steps: int,
        every: int | None,
    ):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings('ignore', category=optuna.exceptions.ExperimentalWarning)
        self.distributions = {key: d.to_optuna() for key, d in distributions.items()}
        self.options, self.read, self.steps, self.every = options, read, steps, every or steps
        self._ended: dict[int, FrozenTrial] = {}
        self._drawn: dict[int, dict[str, Drawn]] = {}

    def draw(self, number: int) -> dict[str, Drawn] | None:
        """Returns the values of a trial, in Optuna's form; None: a trial that it depends on has not ended."""
        if number not in self._drawn:
            study = self._make_study(number)
            if study is None:
                return None
            self._drawn[number] = study.ask(self.distributions).params
        return self._drawn[number]

    def draw_at_random(self, count: int) -> list[dict[str, Drawn]]:
        """Returns the values of so many points, in Optuna's form, which depend on no result."""
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(self.options.seed))
        return [study.ask(self.distributions).params for _ in range(count)]

    def judge(self, number: int) -> FrozenTrial | None:
        """Returns a trial that has ended; None: it has not ended."""
        if number not in self._ended and (ended := self._judge(number)):
            self._ended[number] = ended
        return self._ended.get(number)

    def rate(self) -> dict[str, float]:
        """Returns the importance of each parameter, shares of 1, over the trials that have ended; {} before there are
        enough (PED-ANOVA, Watanabe et al., arXiv 2304.10255)."""
        study = self._make_empty()
        for trial in map(self.judge, range(self.options.trials)):
            loss = trial.value if trial and trial.state.name == 'COMPLETE' else None
            if trial and loss is not None and math.isfinite(loss):
                study.add_trial(trial)
        if len(study.trials) < 4:
            return {}
        try:
            found = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
        except (ValueError, RuntimeError):  # such as equal losses
            return {}
        return {key: float(share) for key, share in found.items() if math.isfinite(share)}

    def _judge(self, number: int) -> FrozenTrial | None:
        if (result := self.read(number)) is None:
            return None
        values, known = dict(result.values), {key: self.distributions[key] for key in result.values}
        has_diverged = result.failed_with == Diverged.exit_code  # perhaps in its last steps
        if has_diverged or (result.failed_with is not None and not result.is_finished):
            # The loss of a trial that diverged or was refused is the worst: the sampler keeps away from its values.
            state = TrialState.COMPLETE if values else TrialState.FAIL
            worst = math.inf if values else None
            return create_trial(state=state, params=values, distributions=known, value=worst)
        pruned_at, rungs = None, {}
        if self.options.prune:
            if (followed := self._follow(number, result, values, known)) is None:
                return None
            pruned_at, rungs = followed
        if pruned_at is None and not result.is_finished:
            return None
        loss = result.losses[-1][1] if result.losses else math.inf
        return create_trial(
            state=TrialState.COMPLETE if pruned_at is None else TrialState.PRUNED,
            params=values,
            distributions=known,
            value=None if pruned_at is not None else math.inf if math.isnan(loss) else loss,
            intermediate_values={s: x for s, x in result.losses if pruned_at is None or s <= pruned_at},
            system_attrs=rungs,
        )

    def _follow(
        self, number: int, result: TrialResult, values: dict[str, Drawn], known: dict[str, BaseDistribution]
    ) -> tuple[int | None, dict[str, object]] | None:
        """Reports the evaluations of a trial one by one, up to one that prunes it.

        Returns the step of that evaluation, and what Hyperband noted about the trial; None: a trial that it depends on
        has not ended.
        """
        if (study := self._make_study(number)) is None:
            return None
        study.add_trial(create_trial(state=TrialState.RUNNING, params=values, distributions=known))
        trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
        pruned_at = None
        for step, loss in result.losses:
            if step < self.steps and pruned_at is None:
                trial.report(loss, step)
                pruned_at = step if trial.should_prune() else None
        return pruned_at, dict(study.get_trials(deepcopy=False)[number].system_attrs)

    def _make_study(self, number: int) -> optuna.Study | None:
        """Returns the study that trial `number` knows; None: a trial that it depends on has not ended.

        The last `parallel` − 1 trials before it may be at work, so their values alone are known.
        """
        study = self._make_empty(number)
        for i in range(number):
            if i <= number - self.options.parallel:
                if (ended := self.judge(i)) is None:
                    return None
                study.add_trial(ended)
            elif (values := self.draw(i)) is None:
                return None
            else:
                study.add_trial(create_trial(state=TrialState.RUNNING, params=values, distributions=self.distributions))
        return study

    def _make_empty(self, number: int = 0) -> optuna.Study:
        digest = hashlib.sha256(f'{self.options.seed}/{number}'.encode()).digest()
        seed = int.from_bytes(digest[:4], 'big')
        samplers: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
            'tpe': lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=self.options.parallel > 1),
            'random': lambda: optuna.samplers.RandomSampler(seed=seed),
        }
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if self.options.prune:
            least = max(self.every, math.ceil(self.steps / REDUCTION**LEVELS))
            pruner = optuna.pruners.HyperbandPruner(least, self.steps, REDUCTION)
        # The bracket of a trial comes from this name and the trial's number.
        return optuna.create_study(study_name='lm', sampler=samplers[self.options.sampler](), pruner=pruner)
