"""Classes of flash-linear-attention on a CPU, where Triton's interpreter runs their kernels.

Triton chooses its interpreter when it is imported, and other tests need none. So the functions here start this file as
a program of its own:

    PYTHONPATH=$PWD:tests python tests/interop/recurrent_classes.py record FORM
    PYTHONPATH=$PWD:tests python tests/interop/recurrent_classes.py use FOLDER SAVED

Both print JSON. The first one computes the record of a form of `checkpoints`. The second one loads an export, and reads
tokens from its standard input; it writes the model again to SAVED.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = 'flash-linear-attention'


def need_classes() -> None:
    """Skips a test where the classes, or Triton with its interpreter, are not installed."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f'needs: pip install {PACKAGE}')
    if importlib.util.find_spec('triton') is None:
        pytest.skip(f'{PACKAGE} needs Triton here, which it does not install everywhere: pip install triton')


def record(form: str) -> dict:
    """Returns the record of a form."""
    return _start('record', form)


def use(folder: pathlib.Path, saved: pathlib.Path, tokens: list[int]) -> dict:
    """Returns what an exported model gives: the class, logits at once and with a cache, and the greedy text after a
    prompt. Writes the model again to `saved`."""
    return _start('use', str(folder), str(saved), given=json.dumps(tokens))


def _start(*arguments: str, given: str = '') -> dict:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {'TRITON_INTERPRET': '1', 'PYTHONPATH': path}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, input=given, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def import_classes() -> None:
    """Imports the classes. Their kernels take the first of their configurations, because none can be timed here."""
    from triton.runtime import autotuner

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    autotuner.Autotuner.run = run
    import fla  # noqa: F401


def load_export(folder: str, saved: str, tokens: list[int]) -> dict:
    """Does the work of `use`."""
    import checkpoints
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0]
        cache, parts = None, []
        for piece in ids.split([checkpoints.PROMPT] + [1] * checkpoints.WRITTEN, dim=1):
            result = model(piece, use_cache=True, past_key_values=cache)
            cache = result.past_key_values
            parts.append(result.logits[0])
        # `generate` of transformers 5.24 gives the cache another name, and flash-linear-attention 0.6.0 loses it.
        options = {'max_new_tokens': checkpoints.WRITTEN, 'do_sample': False, 'use_cache': False}
        written = model.generate(ids[:, : checkpoints.PROMPT], **options)
    model.save_pretrained(saved)
    return {
        'class': type(model).__name__,
        'logits': logits.tolist(),
        'decoded': torch.cat(parts).tolist(),
        'written': written[0].tolist(),
    }


if __name__ == '__main__':
    import_classes()
    import checkpoints

    match sys.argv[1:]:
        case ['record', form]:
            found = checkpoints.compute_here(form)
        case ['use', folder, saved]:
            found = load_export(folder, saved, json.load(sys.stdin))
        case _:
            sys.exit('record FORM, or use FOLDER SAVED')
    print(json.dumps(found))
