import pytest
import torch

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.recipes.importers.deepliif import networks_of, renamed
from paceline.recipes.translation import Translation, TranslationSettings


def test_pix2pix_files_map_to_a_generator_and_a_discriminator():
    assert networks_of(["latest_net_G.pth", "latest_net_D.pth", "train_opt.txt"]) == {
        "latest_net_G.pth": "generators.G1",
        "latest_net_D.pth": "discriminators.D1",
    }


def test_deepliif_files_map_to_networks_by_the_number_in_their_names():
    found = networks_of(
        [f"latest_net_{name}.pth" for name in ("G1", "G2", "G3", "G4", "G51", "G52", "G55", "D4", "D53")]
    )
    assert list(found.values()) == [
        *(f"generators.G{number}" for number in (1, 2, 3, 4)),
        *("generators.GS0", "generators.GS1", "generators.GS4", "discriminators.D4", "discriminators.DS2"),
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_segmentation_files_named_gs_may_be_numbered_from_zero_or_one(first):
    files = [f"{epoch}_net_{name}.pth" for epoch in (20,) for name in ("G1", f"GS{first}", f"GS{first + 1}")]
    assert list(networks_of(files).values()) == ["generators.G1", "generators.GS0", "generators.GS1"]


def test_a_folder_with_a_single_network_file_is_accepted():
    assert networks_of(["latest_net_G51.pth"]) == {"latest_net_G51.pth": "generators.GS0"}


def test_files_from_two_models_in_one_folder_are_rejected():
    with pytest.raises(UserError, match=r"latest_net_G51.pth: with 3 modalities.*G41, G42"):
        networks_of(["latest_net_G1.pth", "latest_net_G2.pth", "latest_net_G3.pth", "latest_net_G51.pth"])


def test_the_tensors_of_an_imported_file_can_be_loaded_into_the_recipe():
    spec = DataSpec(channels=3, height=32, width=32, panels=("stain", "segmentation"))
    tiny = {"generator": "resnet_6", "segmentation_generator": "unet_32", "ngf": 1, "ndf": 1, "d_layers": 1}
    recipe = Translation(TranslationSettings(**tiny, norm="instance"), spec)
    other = Translation(TranslationSettings(**tiny, norm="instance"), spec)
    written = dict(other.generators["GS1"].state_dict())
    written["model.1.running_mean"] = torch.zeros(1)  # old versions of torch stored this tensor for InstanceNorm
    network = networks_of(["latest_net_G1.pth", "latest_net_G22.pth"])["latest_net_G22.pth"]
    state = renamed(network, written, recipe.state_dict())
    assert {name for name in recipe.state_dict() if name.startswith("generators.GS1.")} == state.keys()
    recipe.load_state_dict(recipe.state_dict() | state)
    assert torch.equal(recipe.generators["GS1"].model.model[0].weight, other.generators["GS1"].model.model[0].weight)
