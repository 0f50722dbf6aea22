"""`lm import --prove` and `lm export --prove`: weights that are compared by the logits of a fixed prompt."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.text import dump
from lm.errors import writing
from lm.experiment import Experiment, load_of_run
from lm.files import AnyPath, open_path
from lm.interop.card import CARD
from lm.interop.checkpoints import CheckpointFolder, open_checkpoint
from lm.interop.export_run import export_run
from lm.interop.import_run import choose_family, describe_import, describe_model, import_run, read_weights
from lm.interop.proof import FILE, Proof, compute_proof, read_proof
from lm.interop.tensors import WeightFiles
from lm.model.functions import ModelFunctions
from lm.plan.weights import PlanCache, plan_weights
from lm.pod.mesh import MeshConfig, make_mesh, place
from lm.runs.config_diff import compare_texts
from lm.runs.info import read_raw
from lm.runs.paths import read_text
from lm.runs.run_dir import RunDir


def import_and_prove(experiment: Experiment, folder_name: str, run_dir: str, **options: Any) -> None:
    """Does what `import_run` does, writes the proof of the run, and prints how it differs from the checkpoint's.

    Only exports of lm that were proved have a proof. The same command goes on if it was stopped after the import.

    Raises the errors of `import_run` and `Proof.compare`.
    """
    run, source = RunDir(run_dir), open_path(folder_name, 'DIR')
    if is_unproved(experiment, source, run, options.get('allow_imports', False)):
        print(f'{run.path} holds this import, without a proof')
    else:
        import_run(experiment, folder_name, run_dir, **options)
    proof, known = prove_run(run, 0), read_proof(source) if source.is_dir() else None
    proof.write(run.path)
    kept = f'the logits of a fixed prompt are kept in {run.path / FILE}'
    print(kept if known is None else proof.compare(known, str(source)))


def is_unproved(experiment: Experiment, source: AnyPath, run: RunDir, allow_imports: bool) -> bool:
    """Returns whether a run is the complete import of `source` with this configuration, and has no proof."""
    if read_raw(run.info).get('imported') != str(source) or not run.has_checkpoint() or (run.path / FILE).exists():
        return False
    expected = describe_import(experiment, open_checkpoint(source), allow_imports)
    return not compare_texts(read_text(run.config), dump(expected))


def export_and_prove(
    experiment: Experiment, run_dir: str, step: int | None, *, weights: WeightFiles, **options: Any
) -> None:
    """Does what `export_run` does, reads the export as `lm import` does, and compares it with the run and with the
    import that the run is. The model card says what was checked.

    Raises the errors of `export_run` and `Proof.compare`.
    """

    def check(step: int, folder: pathlib.Path) -> None:
        run = RunDir(run_dir, found=True)
        found, written = prove_run(run, step), prove_folder(folder)
        written.write(folder)
        imported = read_proof(run.path) if step == 0 else None
        lines = [found.compare(imported, 'the import')] if imported else []
        if weights.dtype == 'float32':
            lines.append(written.compare(found, str(run.path)))
        print('\n'.join(lines) or f'the weights are {weights.dtype}: their logits are compared with no others')
        with writing(folder / CARD), (folder / CARD).open('a') as card:
            card.write(''.join(['\n## Checks\n\n', *(f'- {line[0].upper()}{line[1:]}.\n' for line in lines)]))

    export_run(experiment, run_dir, step, weights=weights, check=check, **options)


def prove_run(run: RunDir, step: int) -> Proof:
    """Computes the proof of the weights of a run at a step."""
    model = load_of_run(str(run.path)).model
    functions, mesh = ModelFunctions(model, jnp.float32), make_mesh(MeshConfig(), jax.local_devices()[:1])
    weights = plan_weights('--run_dir', str(run.path), step, {}, functions, PlanCache())
    return compute_proof(model, weights.read(place(functions.abstract, mesh, functions.declared)))


def prove_folder(folder: pathlib.Path) -> Proof:
    """Computes the proof of what `lm import` would read from a folder that this process has written."""
    checkpoint = CheckpointFolder(folder)
    family = choose_family(checkpoint)
    model = describe_model(family, checkpoint, allow_imports=True)
    return compute_proof(model, read_weights(family, checkpoint, ModelFunctions(model, jnp.float32)))
