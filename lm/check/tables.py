"""What `lm check` prints for people."""

from lm.check.compiled_step import Check, Plan
from lm.experiment import Experiment
from lm.hardware import parse
from lm.text import duration, si
from lm.training.progress import plan_rows, print_row

WIDTH = 24


def print_plan(plan: Plan, experiment: Experiment) -> None:
    """The configuration, in the words of `lm train`."""
    rows = plan_rows(experiment.model, experiment.train, plan.parameters_total)
    row('parameters', rows.pop('parameters'))
    for part, count in plan.parameters.items():
        if count:
            row(f'  {part}', f'{count:,}')
    rows['FLOPs per token'] += f', forward and backward; {plan.flops_total:.3g} for the run'
    for name, value in rows.items():
        row(name, value)


def print_check(check: Check, plan: Plan) -> None:
    """One topology."""
    topology = parse(check.topology)
    chip, unit = topology.chip, 'chip' if check.devices == check.chips else 'core'
    print()
    row(
        'topology',
        f'{check.topology}: {check.chips} chips, {check.devices} devices; '
        f'{"compiled in" if check.roofline else "refused by the compiler after"} {check.compile_seconds:.0f} s'
        + (f' with {", ".join(check.bindings)}' if check.bindings else ''),
    )
    memory = check.memory
    verdict = 'fits' if check.fits else 'does NOT fit'
    row(f'memory per {unit}', f'{memory.needed_gib:.2f} GiB of {memory.limit_gib} GiB of HBM: {verdict}')
    if memory.arguments_gib is not None:
        row('  arguments', f'{memory.arguments_gib:.2f} GiB: parameters, optimizer state, batch')
        row('  outputs', f'{memory.outputs_gib:.2f} GiB, {memory.aliased_gib:.2f} of it in place of the arguments')
        row('  temporaries', f'{memory.temporaries_gib:.2f} GiB: gradients, activations')
    if check.advice is not None:
        print_advice(check, plan)
    if check.roofline is None or not check.fits:
        return
    bound, speed = check.roofline, check.speed
    n = check.devices // check.chips
    model_share = plan.flops_per_token * plan.tokens_per_step / check.devices / (bound.hardware_teraflops * 1e12)
    row('time per step', f'at least {milliseconds(speed.seconds_per_step)}, bound by {bound.bound_by}')
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
        sent = sum(e.gigabytes_sent_per_device for e in bound.exchanges)
        links = f'{sent:.3g} GB sent a {unit} at {topology.ici_bytes / n / 1e9:.0f} GB/s'
        row('  ICI', f'{milliseconds(bound.ici_seconds)}: {links}' if sent else 'nothing is exchanged')
    for e in bound.exchanges:
        row(f'    {e.kind}', f'{e.times_per_step:,} × a step, {e.gigabytes_sent_per_device:.3g} GB sent a {unit}')
    row(
        'speed',
        f'at most {speed.steps_per_second:.3g} steps/s, {si(speed.tokens_per_second)} tokens/s, MFU {speed.mfu:.1%}',
    )
    row(
        'the whole run',
        f'at least {duration(speed.run_hours * 3600)}: {speed.run_hours:,.1f} hours, '
        f'{speed.run_chip_hours:,.0f} chip-hours',
    )
    for text in bound.notes:
        row('note', text)
    row('note', 'a roofline of data-sheet peaks, not a measurement: a real step takes longer (docs/check.md)')


def print_advice(check: Check, plan: Plan) -> None:
    """What was tried, and, if anything fits, the numbers with it."""
    advice = check.advice
    for i, tried in enumerate(advice.tried):
        row('tried' if i == 0 else '', f'{", ".join(tried.bindings)}: {tried.needed_gib:.2f} GiB')
    if advice.check is None:
        nearest = f'; nearest: {advice.nearest.needed_gib:.2f} GiB' if advice.nearest else ''
        row('advice', f'nothing fits{nearest}: take a larger topology, or a shorter train.context_length')
        return
    row('advice', 'add, tried and verified by compiling:')
    for binding in advice.check.bindings:
        row('', f'--gin_param "{binding}"')
    print_check(advice.check, plan)


def row(name: str, value: str) -> None:
    print_row(name, value, WIDTH)


def milliseconds(seconds: float) -> str:
    return f'{seconds * 1e3:,.3g} ms' if seconds < 1 else f'{seconds:,.2f} s'
