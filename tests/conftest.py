"""Every test sees 8 simulated CPU devices; the environment is set before jax is first imported."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
