"""JobSets of Kubernetes, one per point, which Kueue admits: https://jobset.sigs.k8s.io, https://kueue.sigs.k8s.io.

The policy by exit codes is the podFailurePolicy of the Jobs. 42 and a pod that was evicted are ignored, so the Job
makes the pod anew. 2, 43, 44 and 45 fail the Job with the reason PodFailurePolicy, at which the JobSet fails for good.
Other codes fail the Job too, and the JobSet starts all its Jobs again. A JobSet cannot leave out a machine by itself:
after 45 the next `lm sweep --emit` writes the JobSet with the names of the machines that it must not use.

Names of GKE's TPU nodes: https://cloud.google.com/kubernetes-engine/docs/how-to/tpus.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from lm.errors import ConfigError
from lm.sweep.manifests.base import AGAIN, ELSEWHERE, NEVER, PORT, ClusterJob, ManifestFormat
from lm.sweep.options import ClusterOptions

TPU_NODES = {
    'v4': 'tpu-v4-podslice',
    'v5e': 'tpu-v5-lite-podslice',
    'v5p': 'tpu-v5p-slice',
    'v6e': 'tpu-v6e-slice',
}
"""Generation → GKE's name of its nodes."""
PREFIX = 'cloud.google.com/gke-'
CONTAINER = 'lm'
SAVING_SECONDS = 300
"""The time that a pod has for its last checkpoint when it is told to stop."""
Tree = dict[str, Any]


class JobSetFormat(ManifestFormat):
    """A JobSet per point: a Job per slice, a pod per machine."""

    name = 'jobset'
    needs = ('image',)
    uses = ('topology', 'gpus', 'nodes', 'queue', 'namespace', 'service_account', 'secret', 'claim', 'spot', 'failures')
    submit = 'kubectl replace --force -f {folder}'

    def check_machines(self, options: ClusterOptions, is_local: bool) -> None:
        chip = options.topology and options.topology.chip.name
        if chip and chip not in TPU_NODES:
            raise ConfigError(
                f'--topology {chip}: --emit {self.name} knows the nodes of {", ".join(TPU_NODES)}; '
                'see scripts/tpu/examples/gcluster.sh for others'
            )
        if is_local != bool(options.claim):
            raise ConfigError(
                '--run_dir: pods see no disk of this machine; name a folder in a bucket, or the volume that holds it '
                'with --claim'
                if is_local
                else '--claim: a sweep in a bucket needs no volume; leave it out'
            )

    def make_files(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> dict[str, str]:
        trees = {f'{job.name}.yaml': make_jobset(job, options) for job in jobs}
        return {name: yaml.safe_dump(tree, sort_keys=False, width=120) for name, tree in trees.items()}


def make_jobset(job: ClusterJob, options: ClusterOptions) -> Tree:
    """Returns the JobSet of a point."""
    metadata: Tree = {'name': job.name}
    if options.namespace:
        metadata['namespace'] = options.namespace
    metadata['labels'] = {'app.kubernetes.io/name': 'lm'}
    if options.queue:
        metadata['labels']['kueue.x-k8s.io/queue-name'] = options.queue
    metadata['annotations'] = {'point': job.point, 'run_dir': f'{job.root}/{job.point}'}
    slices = options.topology.slices if options.topology else 1
    if slices > 1:  # each slice is a node pool of its own
        metadata['annotations']['alpha.jobset.sigs.k8s.io/exclusive-topology'] = f'{PREFIX}nodepool'
    final = {'name': 'never_again', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': metadata,
        'spec': {
            'failurePolicy': {'maxRestarts': options.most_failures, 'rules': [final]},
            'replicatedJobs': [{'name': CONTAINER, 'replicas': slices, 'template': make_job(job, options)}],
        },
    }


def make_job(job: ClusterJob, options: ClusterOptions) -> Tree:
    """Returns the template of the Job of a slice."""

    def on_codes(action: str, codes: Sequence[int]) -> Tree:
        return {
            'action': action,
            'onExitCodes': {'containerName': CONTAINER, 'operator': 'In', 'values': list(codes)},
        }

    evicted = {'action': 'Ignore', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]}
    rules = [on_codes('FailJob', NEVER), on_codes('FailJob', ELSEWHERE), on_codes('Ignore', AGAIN), evicted]
    return {
        'spec': {
            'completionMode': 'Indexed',
            'completions': options.machines_per_slice,
            'parallelism': options.machines_per_slice,
            'backoffLimit': 0,
            'podFailurePolicy': {'rules': rules},
            'template': {'spec': make_pod(job, options)},
        }
    }


def make_pod(job: ClusterJob, options: ClusterOptions) -> Tree:
    """Returns the pod of a machine."""
    pod: Tree = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': SAVING_SECONDS}
    if options.service_account:
        pod['serviceAccountName'] = options.service_account
    selector = {}
    if options.topology:
        chip, shape = options.topology.chip.name, 'x'.join(map(str, options.topology.shape))
        selector |= {f'{PREFIX}tpu-accelerator': TPU_NODES[chip], f'{PREFIX}tpu-topology': shape}
    if options.spot:
        selector[f'{PREFIX}spot'] = 'true'
        pod['tolerations'] = [{'key': f'{PREFIX}spot', 'operator': 'Equal', 'value': 'true', 'effect': 'NoSchedule'}]
    if selector:
        pod['nodeSelector'] = selector
    if job.excluded:
        avoids = {'key': 'kubernetes.io/hostname', 'operator': 'NotIn', 'values': list(job.excluded)}
        terms = {'nodeSelectorTerms': [{'matchExpressions': [avoids]}]}
        pod['affinity'] = {'nodeAffinity': {'requiredDuringSchedulingIgnoredDuringExecution': terms}}
    container = make_container(job, options)
    if options.claim:
        container['volumeMounts'] = [{'name': 'sweep', 'mountPath': job.root}]
        pod['volumes'] = [{'name': 'sweep', 'persistentVolumeClaim': {'claimName': options.claim}}]
    return pod | {'containers': [container]}


def make_container(job: ClusterJob, options: ClusterOptions) -> Tree:
    """Returns the container. `lm` is its first process, so it gets SIGTERM itself and saves."""
    command, resources = job.command, {}
    environment = [{'name': 'NODE_NAME', 'valueFrom': {'fieldRef': {'fieldPath': 'spec.nodeName'}}}]
    if options.topology:  # GKE tells the processes of a slice where to meet
        resources = {'google.com/tpu': str(options.chips_per_machine)}
    elif options.gpus:
        resources = {'nvidia.com/gpu': str(options.gpus_per_machine)}
    if not options.topology and options.processes > 1:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environment.append({'name': 'PROCESS_ID', 'valueFrom': {'fieldRef': {'fieldPath': index}}})
        # JobSet gives each pod this host name: JOBSET-JOB-REPLICA-INDEX, in the domain of the JobSet.
        command += ['--coordinator_address', f'{job.name}-{CONTAINER}-0-0.{job.name}:{PORT}']
        command += ['--process_count', str(options.processes), '--process_id', '$(PROCESS_ID)']
    found: Tree = {'name': CONTAINER, 'image': options.image, 'command': command, 'env': environment}
    if options.secret:
        found['envFrom'] = [{'secretRef': {'name': options.secret}}]
    return found | ({'resources': {'limits': resources}} if resources else {})
