import torch

from paceline.contracts.recipe import Draw
from paceline.data.feed import drawn_batches
from paceline.data.stream import BLOCK_ROWS, Drawer

DRAWS = {"noise": Draw((3,), "normal"), "where": Draw((2, 2), "uniform"), "coin": Draw((), "uniform", common=True)}


def drawer(seed: int = 0, dtype: torch.dtype = torch.float32) -> Drawer:
    return Drawer(DRAWS, seed, torch.device("cpu"), dtype)


def test_random_inputs_for_evaluation_depend_only_on_seed_position_and_purpose():
    whole = drawer().rows("evaluation", 0, 3 * BLOCK_ROWS)
    for start, stop in ((0, 1), (7, BLOCK_ROWS), (BLOCK_ROWS - 1, BLOCK_ROWS + 1), (400, 1400)):
        some = drawer().rows("evaluation", start, stop)
        assert all(torch.equal(some[name], whole[name][start:stop]) for name in DRAWS)
    assert not torch.equal(whole["noise"], drawer().rows("samples", 0, 3 * BLOCK_ROWS)["noise"])
    assert not torch.equal(whole["noise"], drawer(seed=1).rows("evaluation", 0, 3 * BLOCK_ROWS)["noise"])
    assert len(whole["noise"].unique()) > 4000  # blocks of random numbers do not repeat
    assert len(whole["coin"].unique()) == 1


def test_random_inputs_across_all_ranks_equal_those_in_one_process():
    whole = drawer().rows("evaluation", 0, 1234)
    for size in (1, 2, 3):
        batches = [batch for rank in range(size) for batch in drawn_batches(drawer(), 1234, rank, size)]
        assert torch.equal(torch.cat([batch["noise"] for batch in batches]), whole["noise"])
        assert torch.equal(torch.cat([batch["index"] for batch in batches]), torch.arange(1234))


def test_random_inputs_are_the_same_numbers_in_every_precision():
    wide = drawer(dtype=torch.float64).rows("evaluation", 0, 5)["noise"]
    assert torch.equal(wide, drawer().rows("evaluation", 0, 5)["noise"].double())
