"""Steps of several frameworks that take turns: the parts of a batch, and the table of a trace."""

from scripts.gpu.peers.profile_step import Kernel, classify, summarize
from scripts.gpu.peers.turns import Batch, Column, Shape


def test_a_microbatch_has_whole_windows():
    assert Batch(1024, 65_536).rows(16_384) == 16
    assert Batch(32_768, 65_536).rows(16_384) == 1


def test_a_column_travels_as_a_dict():
    found = {'name': 'a', 'framework': 'jax', 'kind': 'by_hand', 'shape': {}, 'gin_params': ['x']}
    shape = {'layers': 1, 'width': 8, 'heads': 2, 'head_dim': 4, 'hidden': 16, 'vocabulary': 32}
    column = Column.read(found | {'shape': shape})
    assert column.shape == Shape(**shape)
    assert column.gin_params == ('x',)


def test_kernels_are_told_apart():
    assert classify('nvjet_hsh_128x256', 'gemm_fusion.1', 'jit(train)/jvp(layers)/glu/dot') == 'products'
    assert classify('cudnn_sdpa_sm90_flash_fprop', '', '') == 'cuDNN attention'
    assert classify('loop_add_fusion', 'loop_add_fusion', 'jit(train)/add') == 'optimizer and sums of gradients'


def test_idle_time_lies_between_kernels():
    found = summarize([Kernel('a', 'a', 0, 3e6), Kernel('b', 'b', 9e6, 3e6)], {})
    assert abs(found['idle_share'] - 0.5) < 1e-9
    assert abs(found['busy_milliseconds'] - 2.0) < 1e-9
