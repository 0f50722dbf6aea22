"""Computations that take turns: who works when, and what they return."""

from lm.ops.tpu.order import side_by_side, stagger, together


def work(name, turns, done):
    """Notes each turn in `done`, and returns the name."""
    for turn in range(turns):
        done.append(f'{name}{turn}')
        yield
    return name


def test_computations_take_turns_until_the_last_one_ends():
    done = []
    side_by_side([work('a', 3, done), work('b', 1, done), work('c', 2, done)])
    assert done == ['a0', 'b0', 'c0', 'a1', 'c1', 'a2']


def test_staggered_computations_begin_one_turn_apart_and_return_the_same():
    done, results = [], []

    def run():
        results.extend((yield from together(stagger(work(name, 3, done) for name in 'abc'))))

    side_by_side([run()])
    assert done == ['a0', 'a1', 'b0', 'a2', 'b1', 'c0', 'b2', 'c1', 'c2']
    assert results == ['a', 'b', 'c']
