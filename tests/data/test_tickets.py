"""Tickets (sample indices with random numbers) depend only on the seed and the position in training."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.stream import NUM_UNIFORMS, Stream, in_order, part, tickets


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_contains_every_sample_once(epoch: int) -> None:
    index, uniforms = tickets(seed=3, epoch=epoch, length=101)
    assert sorted(index) == list(range(101))
    assert uniforms.shape == (101, NUM_UNIFORMS)
    assert uniforms.dtype == np.float32 and uniforms.min() >= 0 and uniforms.max() < 1


def test_sample_order_and_random_numbers_differ_between_epochs_and_seeds() -> None:
    first = tickets(0, 0, 50)
    for other in (tickets(0, 1, 50), tickets(1, 0, 50)):
        assert not np.array_equal(first.index, other.index)
        assert not np.array_equal(first.uniforms, other.uniforms)


def test_the_random_generator_still_returns_the_same_values_as_in_earlier_versions() -> None:
    index, uniforms = tickets(seed=42, epoch=3, length=10)
    assert index.tolist() == [8, 4, 7, 1, 6, 3, 0, 2, 9, 5]
    assert uniforms[0, :3].tolist() == [0.2540859580039978, 0.32575345039367676, 0.09693330526351929]


def test_a_batch_may_span_epochs() -> None:
    taken = Stream(seed=1, length=10).take(8, 25)
    whole = np.concatenate([tickets(1, epoch, 10).index for epoch in range(3)])
    assert np.array_equal(taken.index, whole[8:25])
    assert taken.uniforms.shape == (17, NUM_UNIFORMS)


def test_the_sample_order_does_not_depend_on_the_batch_size() -> None:
    stream = Stream(seed=5, length=13)
    whole = stream.take(0, 60)
    pieces = [stream.take(start, start + 4) for start in range(0, 60, 4)]
    assert np.array_equal(whole.index, np.concatenate([piece.index for piece in pieces]))
    assert np.array_equal(whole.uniforms, np.concatenate([piece.uniforms for piece in pieces]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_samples_of_all_ranks_form_the_global_batch(world_size: int) -> None:
    stream = Stream(seed=9, length=50)
    parts = [stream.take(*part(128, 256, rank, world_size)) for rank in range(world_size)]
    assert np.array_equal(np.concatenate([one.index for one in parts]), stream.take(128, 256).index)
    sizes = [len(one.index) for one in parts]
    assert max(sizes) - min(sizes) <= 1


def test_evaluation_reads_samples_in_order_without_randomness() -> None:
    index, uniforms = in_order(3, 7)
    assert index.tolist() == [3, 4, 5, 6]
    assert not uniforms.any()
