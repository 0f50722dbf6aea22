"""Makes Orbax write to s3://, which it supports in part.

Orbax 0.12 lists s3:// among remote addresses, but asks "is it gs://?" in two places: to complete a save (a marker file
in place of a rename), and to choose the driver of TensorStore. Here s3:// gets the same answers, and its specification
comes from `lm.files.folder_spec`. Nothing changes for other addresses.
"""

import functools
from typing import Any

from etils import epath
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from lm.errors import LmError
from lm.files import folder_spec

S3 = 's3://'


@functools.cache
def teach_s3() -> None:
    """Makes Orbax write to s3:// in this process.

    Raises:
        LmError: this version of Orbax is built in another way.
    """
    try:
        is_gcs_path, kvstore_for_gcs = gcs_utils.is_gcs_path, gcs_utils.get_kvstore_for_gcs
        use_gcs_driver, normalize = tensorstore_utils._use_gcs_driver, tensorstore_utils._normalize_path
    except AttributeError as error:
        raise LmError(
            f'checkpoints on s3:// need orbax-checkpoint 0.12.8 ({error}); install it, or use a folder or gs://…'
        ) from None

    def is_object_store(path: Any) -> bool:
        return _text(path).startswith(S3) or is_gcs_path(path)

    def spec_of(path: str) -> dict[str, Any]:
        if not path.startswith(S3):
            return kvstore_for_gcs(path)
        spec = folder_spec(path)
        return spec | {'path': spec['path'].rstrip('/')}  # it may be a file; for a folder TensorStore adds the slash

    gcs_utils.is_gcs_path = is_object_store
    gcs_utils.get_kvstore_for_gcs = spec_of
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(S3) or use_gcs_driver(path)
    tensorstore_utils._normalize_path = lambda path: path.rstrip('/') if path.startswith(S3) else normalize(path)


def _text(path: Any) -> str:
    return epath.Path(path).as_posix()
