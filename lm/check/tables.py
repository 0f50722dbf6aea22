"""The tables of `lm check`."""

import collections

from lm.check.advice import Tried
from lm.check.gradients import GradientCheck
from lm.cost_model.compiled_step import MARGIN, Budget, Check, Speed
from lm.cost_model.roofline import Roofline
from lm.cost_model.step_time import StepTime
from lm.hardware import Chip, parse
from lm.plan import StepPlan
from lm.text import format_count, format_digits, format_duration, format_si
from lm.training.progress import print_row

WIDTH = 24


def print_budget(budget: Budget, plan: StepPlan) -> None:
    """Prints the configuration, in the words of `lm train`."""
    rows = plan.describe()
    row('parameters', rows.pop('parameters'))
    for part, count in budget.parameters.items():
        if count:
            row(f'  {part}', f'{count:,}')
    rows['FLOPs per token'] += f', forward and backward; {budget.flops_total:.3g} for the run'
    for name, value in rows.items():
        row(name, value)


def print_check(check: Check, budget: Budget, price: float | None = None) -> None:
    """Prints the check of one topology; `price` is the price per chip-hour."""
    print()
    row('topology', f'{check.topology}: {describe_machine(check)}; {describe_compilation(check)}')
    memory, verdict = check.memory, 'fits'
    if not check.fits:
        verdict = 'does NOT fit'
    elif not check.has_headroom:
        verdict = f'fits, with less than {MARGIN:.0%} to spare'
    row(f'memory per {unit_of(check)}', f'{memory.needed_gib:.2f} GiB of {memory.limit_gib} GiB of HBM: {verdict}')
    if memory.arguments_gib is not None:
        row('  arguments', f'{memory.arguments_gib:.2f} GiB: parameters, optimizer state, batch')
        row('  outputs', f'{memory.outputs_gib:.2f} GiB, {memory.aliased_gib:.2f} of it in place of the arguments')
        row('  temporaries', f'{memory.temporaries_gib:.2f} GiB: gradients, activations')
    if memory.replay_gib is not None:
        row('  replay', f'{memory.replay_gib:.2f} GiB with the state, before each `train.replay_every`-th step')
    if check.roofline is not None and check.fits:
        print_times(check, check.roofline, budget, price)
    if check.advice is not None:  # its table is about another step, so it comes last
        print_advice(check, budget, price)


def describe_machine(check: Check) -> str:
    """Returns how many slices, chips and devices the topology has, in words."""
    slices = parse(check.topology).slices
    counts = [f'{slices} slices'] if slices > 1 else []
    return ', '.join([*counts, format_count(check.chips, 'chip'), format_count(check.devices, 'device')])


def describe_compilation(check: Check) -> str:
    """Returns whether the compiler took the step, after how long, and with which changes of the configuration."""
    outcome = 'compiled in' if check.roofline else 'refused by the compiler after'
    changes = f' with {", ".join(check.bindings)}' if check.bindings else ''
    return f'{outcome} {check.compile_seconds:.0f} s{changes}'


def print_times(check: Check, bound: Roofline, budget: Budget, price: float | None) -> None:
    """Prints bound and prediction of a step that fits, and of the whole run."""
    topology = parse(check.topology)
    chip, unit = topology.chip, unit_of(check)
    runs = ('at most', 'at least', check.speed), ('predicted', 'predicted', check.predicted)
    n = check.devices // check.chips
    model_share = budget.flops_per_token * budget.tokens_per_step / check.devices / (bound.hardware_teraflops * 1e12)
    row('bound of a step', f'at least {milliseconds(bound.seconds)}, by {bound.bound_by}: nothing is faster')
    row(
        '  compute',
        f'{milliseconds(bound.compute_seconds)}: {bound.hardware_teraflops:.3g} TFLOP a {unit} at '
        f'{chip.flops / n / 1e12:.0f} TFLOP/s; the model needs {model_share:.0%} of them',
    )
    if bound.hbm_gigabytes:
        row(
            '  HBM',
            f'{milliseconds(bound.hbm_seconds)}: {bound.hbm_gigabytes:.3g} GB a {unit} at '
            f'{chip.hbm_bytes / n / 1e9:.0f} GB/s',
        )
        sent = sum(e.gigabytes_sent_per_device for e in bound.collectives)
        links = f'{sent:.3g} GB sent a {unit} at {topology.ici_bytes / n / 1e9:.0f} GB/s'
        row('  ICI', f'{milliseconds(bound.ici_seconds)}: {links}' if sent else 'no collectives')
    if topology.slices > 1:
        row('  DCN', between_slices(bound, chip, unit))
    for e in bound.collectives:
        row(f'    {e.kind}', f'{e.times_per_step:,} × a step, {e.gigabytes_sent_per_device:.3g} GB sent a {unit}')
    if check.predicted_step is not None and check.predicted is not None:
        print_prediction(check.predicted_step, check.predicted)
    for words, _, run in runs:
        if run is not None:
            row(
                'speed',
                f'{words} {run.steps_per_second:.3g} steps/s, {format_si(run.tokens_per_second)} tokens/s, '
                f'MFU {run.mfu:.1%}',
            )
    for _, words, run in runs:
        if run is not None:
            row('the whole run', f'{words} {cost_of(run, price)}')
    for text in bound.notes:
        row('note', text)
    row('note', 'a bound and a model of data-sheet peaks, not measurements: a real step takes longer (docs/check.md)')


def print_gradients(found: GradientCheck) -> None:
    """Prints the gradient of each array beside its differences, layer by layer."""
    counts = collections.Counter(one.verdict for one in found.arrays)
    verdicts = ', '.join(f'{count} {verdict}' for verdict, count in counts.items())
    print()
    row('gradients', f'{format_count(len(found.arrays), "array")} of a tiny model in float64: {verdicts}')
    row('rounding to bfloat16', f'of all arrays moves the logits by {found.rounding:.2%}')
    width = max(len(one.name) for one in found.arrays) + 6
    print(f'{"  array":<{width}}   slope  measured    error  rounding')
    layer = ''
    for one in found.arrays:
        if one.layer not in ('', layer):
            print(f'  {one.layer}')
        layer = one.layer
        name = f'{"    " if layer else "  "}{one.name}'
        values = f'{one.claimed:>8.3g}{one.measured:>10.3g}{one.error:>9.0e}{one.rounding:>10.2%}'
        print(f'{name:<{width}}{values}  {one.verdict}{", frozen" if one.frozen else ""}')


def unit_of(check: Check) -> str:
    """Returns the word for a device."""
    return 'chip' if check.devices == check.chips else 'core'


def between_slices(bound: Roofline, chip: Chip, unit: str) -> str:
    """Describes the traffic between slices."""
    if not bound.dcn_gigabytes:
        return 'nothing is sent between the slices, as far as the program says'
    sent = f'{bound.dcn_gigabytes:.3g} GB of gradients sent a {unit} to the other slices'
    if bound.dcn_seconds is None:
        return f'{sent}; no figure of that network is published for {chip.name}, so its time is not predicted'
    return f'{milliseconds(bound.dcn_seconds)}: {sent} at {chip.dcn_bytes / chip.devices / 1e9:.4g} GB/s'


def print_prediction(model: StepTime, predicted: Speed) -> None:
    """Prints the model's time by parts."""
    again = ''
    if model.recomputed_seconds:
        again = f', {milliseconds(model.recomputed_seconds)} of it the forward pass again'
    least, most = predicted.seconds_per_step, max(model.upper_seconds, predicted.seconds_per_step)
    row('prediction of a step', f"{milliseconds(least)}; {milliseconds(most)} with XLA's estimates{again}")
    for part in model.parts:
        row(f'  {part.part}', f'{milliseconds(part.seconds)} to {milliseconds(part.upper_seconds)}')
    if model.unknown_kernels:
        row('note', f'without the schedules of {", ".join(model.unknown_kernels)}: the prediction is too short')


def cost_of(run: Speed, price: float | None) -> str:
    """Formats time, chip-hours and their cost."""
    time, hours = format_duration(run.run_hours * 3600), format_digits(run.run_hours)
    text = f'{time}: {hours} hours, {format_digits(run.run_chip_hours)} chip-hours'
    return text if price is None else f'{text}, {price * run.run_chip_hours:,.2f} at {price:g} each'


def print_advice(check: Check, budget: Budget, price: float | None = None) -> None:
    """Prints all trials, and, if any fits, the gin lines of the fastest and its numbers."""
    advice = check.advice
    for i, tried in enumerate(advice.tried):
        row('tried' if i == 0 else '', tried_line(tried))
    if advice.left_out:
        changes = format_count(advice.left_out, 'change was', 'changes were')
        row('', f'{changes} not tried, because the time was over: --advice_minutes sets it')
    best = advice.check
    if best is None:
        nearest = f'; nearest: {advice.nearest.needed_gib:.2f} GiB' if advice.nearest else ''
        row('advice', f'nothing fits{nearest}: take a larger topology, or a shorter train.context_length')
        return
    spare = f'{MARGIN:.0%} of the memory to spare'
    if not best.bindings:
        roomy, tight = f'of what fits with {spare} this is the fastest by prediction', f'nothing fits with {spare}'
        row('advice', f'none: {roomy if best.has_headroom else f"{tight}, and of what fits this needs least"}')
        return
    how = f'the fastest by prediction with {spare}'
    row('advice', f'{how if best.has_headroom else "what needs least; it hardly fits"}; add to the configuration:')
    for binding in best.bindings:
        row('', binding)
    print_check(best, budget, price)


def tried_line(tried: Tried) -> str:
    """Formats one candidate: changes, memory, predicted time."""
    line = f'{", ".join(tried.bindings) or "as configured"}: {tried.needed_gib:.2f} GiB'
    if tried.seconds is not None:
        line += f', {milliseconds(tried.seconds)}'
    return line if tried.has_headroom or tried.seconds is None else f'{line}, too little to spare'


def row(name: str, value: str) -> None:
    print_row(name, value, WIDTH)


def milliseconds(seconds: float) -> str:
    return f'{seconds * 1e3:,.3g} ms' if seconds < 1 else f'{seconds:,.2f} s'
