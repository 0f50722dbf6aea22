"""`lm doctor`: what a paid start needs of this machine and of its storage, each check with a limit in time.

It changes nothing: the small files that it writes are deleted again. It prints no secret.
"""

import dataclasses
import json
import queue
import sys
import threading
from collections.abc import Sequence

from lm.doctor import machine, place
from lm.doctor.finding import Examination, Finding, Weight, wrong
from lm.errors import LmError
from lm.experiment import load_registry
from lm.secrets import redact
from lm.text import make_visible


def examine(paths: Sequence[str], *, as_json: bool = False) -> int:
    """Examines the machine and these places, and prints the findings as they come. Returns 1 if something is wrong.

    Raises ConfigError for an address that no command reads.
    """
    load_registry()  # it knows the names of bindings
    checks = [*machine.make_checks(), *(check for path in paths for check in place.make_checks(path))]
    found = []
    for check in checks:
        for finding in run_check(check):
            shown = dataclasses.replace(
                finding, text=make_visible(redact(finding.text)), remedy=make_visible(redact(finding.remedy))
            )
            found.append(shown)
            if not as_json:
                remedy = f'; {shown.remedy}' if shown.remedy else ''
                print(f'{shown.weight:4}  {shown.subject:9}  {shown.text}{remedy}', flush=True)
    bad = [finding for finding in found if finding.weight is Weight.WRONG]
    if as_json:
        print(json.dumps({'findings': [dataclasses.asdict(finding) for finding in found]}, indent=2))
    else:
        doubts = sum(finding.weight is Weight.DOUBT for finding in found)
        print(f'{len(found)} findings: {len(bad)} bad, {doubts} to look at', file=sys.stderr)
    return LmError.exit_code if bad else 0


def run_check(check: Examination) -> list[Finding]:
    """Runs a check in a thread of its own, which may hang for ever. Returns what it has found within its limit."""
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def work() -> None:
        try:
            for finding in check.examine():
                found.put(finding)
        except Exception as error:
            found.put(_explain(check.subject, error))

    thread = threading.Thread(target=work, name=f'check of {check.subject}', daemon=True)
    thread.start()
    thread.join(check.seconds)
    findings = [found.get() for _ in range(found.qsize())]
    if thread.is_alive():
        findings.append(wrong(check.subject, f'no answer within {check.seconds:.0f} s', 'it hangs for commands too'))
    return findings


def _explain(subject: str, error: Exception) -> Finding:
    text = ' '.join(str(error).split())[:300]
    if isinstance(error, LmError):
        what, _, remedy = text.rpartition('; ')
        return wrong(subject, what or remedy, remedy if what else '')
    return wrong(subject, text or type(error).__name__, '' if '; ' in text else 'allow it, or choose another place')
