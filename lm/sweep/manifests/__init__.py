"""Manifests that hand the points of a sweep to a cluster, one file per format. Importing this package registers all."""

from lm.config.configurable import import_modules
from lm.sweep.manifests.base import ELSEWHERE, FORMATS, ClusterJob, ManifestFormat

import_modules(__name__, __path__)

__all__ = ['ELSEWHERE', 'FORMATS', 'ClusterJob', 'ManifestFormat']
