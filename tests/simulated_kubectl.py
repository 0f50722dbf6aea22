"""A `kubectl replace --force -f FOLDER` without a cluster: it runs the pods of JobSets on paper, and loses some.

$SIMULATED_CLUSTER names a folder. outcomes.json there has point → the ends of its pods, one after the other: an exit
code, or 'lost' for a pod whose machine is taken away. The rules of the manifests decide what happens then. pods.json
gets point → [[machine, end], …], and the state of its JobSet.
"""

import json
import os
import pathlib
import sys

import yaml

MACHINES = ('machine-0', 'machine-1', 'machine-2')


def find_action(job: dict, end: int | str) -> str:
    """Returns the action of the first rule of the podFailurePolicy that a pod's end matches; 'Count' without one."""
    for rule in job['podFailurePolicy']['rules']:
        conditions = [c['type'] for c in rule.get('onPodConditions', ())]
        codes = rule.get('onExitCodes', {'values': []})
        if (end == 'lost' and 'DisruptionTarget' in conditions) or (
            codes.get('operator') == 'In' and end in codes['values']
        ):
            return rule['action']
    return 'Count'


def choose_machine(pod: dict) -> str:
    """Returns the first machine that the pod's affinity allows."""
    affinity = pod.get('affinity', {}).get('nodeAffinity', {})
    terms = affinity.get('requiredDuringSchedulingIgnoredDuringExecution', {'nodeSelectorTerms': []})
    rules = [rule for term in terms['nodeSelectorTerms'] for rule in term['matchExpressions']]
    assert all((r['key'], r['operator']) == ('kubernetes.io/hostname', 'NotIn') for r in rules)
    return next(m for m in MACHINES if all(m not in rule['values'] for rule in rules))


def run(jobset: dict, ends: list) -> tuple[list, str]:
    """Returns the pods of a JobSet with one Job, and its state at the end."""
    (replicated,) = jobset['spec']['replicatedJobs']
    job, policy = replicated['template']['spec'], jobset['spec']['failurePolicy']
    pods, restarts, failed = [], 0, 0
    while ends:
        end = ends.pop(0)
        pods.append([choose_machine(job['template']['spec']), end])
        if end == 0:
            return pods, 'Completed'
        action = find_action(job, end)
        failed += action == 'Count'
        reason = {'FailJob': 'PodFailurePolicy', 'Count': 'BackoffLimitExceeded'}.get(action)
        if action == 'Ignore' or (action == 'Count' and failed <= job['backoffLimit']):
            continue
        if any(r['action'] == 'FailJobSet' and reason in r['onJobFailureReasons'] for r in policy['rules']):
            return pods, f'Failed: {reason}'
        restarts, failed = restarts + 1, 0
        if restarts > policy['maxRestarts']:
            return pods, 'Failed: maxRestarts'
    return pods, 'Running'


def main() -> None:
    assert sys.argv[1:4] == ['replace', '--force', '-f'], sys.argv
    cluster = pathlib.Path(os.environ['SIMULATED_CLUSTER'])
    outcomes = json.loads((cluster / 'outcomes.json').read_text())
    found = {}
    for path in sorted(pathlib.Path(sys.argv[4]).glob('*.yaml')):
        jobset = yaml.safe_load(path.read_text())
        assert jobset['kind'] == 'JobSet'
        point = jobset['metadata']['annotations']['point']
        found[point] = run(jobset, outcomes[point])
    (cluster / 'pods.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main()
