"""The Triton kernels of the degradation compute what PyTorch's own operations compute in float64.

Without a GPU, the kernels run in Triton's interpreter (see tests/conftest.py).
"""

import pytest
import torch
import torch.nn.functional as F

from paceline.images.degradation import second_order
from paceline.images.degradation.operations import (
    AREA,
    BICUBIC,
    BILINEAR,
    SIDE,
    Canvas,
    NoiseParameters,
    Resize,
    add_noise,
    blur,
    jpeg,
    resize_images,
)
from paceline.images.degradation.second_order import NUM_NUMBERS, degrade

pytest.importorskip("triton")

from paceline.images.degradation import triton_steps
from paceline.images.degradation.triton_steps import BLUR, NOISE, RESIZE, ImageSteps, compress_in_place

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
LEVELS = 0.01  # largest difference in levels that float32 causes


def smooth(num: int, channels: int, *size: int) -> torch.Tensor:
    """Return images with levels from 0 to 255 that change slowly, dark and bright parts included."""
    noise = torch.rand(num, channels, 5, 5, generator=torch.Generator().manual_seed(1))
    return (F.interpolate(noise, size, mode="bicubic") * 400 - 70).clamp(0, 255).to(DEVICE)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def wide(canvas: Canvas) -> Canvas:
    return canvas.replaced(canvas.pixels.double())


def steps(
    num: int, kernels: torch.Tensor | None = None, new: Resize | None = None, noise: NoiseParameters | None = None
) -> ImageSteps:
    """Return the parameters of steps; the parameters of unused steps have no meaning."""
    nothing = torch.zeros(num, dtype=torch.int64, device=DEVICE)
    silent = NoiseParameters(nothing, nothing.float(), nothing.bool(), nothing.bool())
    kernels = torch.zeros(num, SIDE, SIDE, device=DEVICE) if kernels is None else kernels
    return ImageSteps(kernels, new or Resize(nothing, nothing, nothing, (1, 1)), noise or silent, (40, 44))


def assert_equal_images(found: Canvas, wanted: Canvas) -> None:
    assert torch.equal(found.height, wanted.height) and torch.equal(found.width, wanted.width)
    for number, (rows, columns) in enumerate(zip(found.height.tolist(), found.width.tolist(), strict=True)):
        one, other = (canvas.pixels[number, :, :rows, :columns].double() for canvas in (found, wanted))
        torch.testing.assert_close(one, other, atol=LEVELS, rtol=0)


def test_the_blur_kernel_equals_torch_even_for_images_smaller_than_the_filter() -> None:
    canvas = Canvas(smooth(3, 1, 34, 40), integers(34, 5, 1), integers(20, 4, 3))
    kernels = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for number, margin in enumerate((8, 5, 6)):  # so many weights at each border are zero
        kernels[number] = F.pad(kernels[number, margin:-margin, margin:-margin], [margin] * 4)
    kernels[0, :, : SIDE // 2] = kernels[0, :, SIDE // 2 + 1 :] = 0  # higher than wide
    found = steps(3, kernels).apply(canvas, integers(BLUR, BLUR, BLUR), (40, 44))
    assert_equal_images(found, blur(wide(canvas), kernels.double()))


def test_the_resizing_kernel_equals_torch_for_all_filters_up_and_down() -> None:
    canvas = Canvas(smooth(6, 1, 40, 30), integers(40, 40, 31, 12, 9, 2), integers(30, 11, 30, 30, 13, 5))
    filters = integers(AREA, BILINEAR, BICUBIC, AREA, BILINEAR, BICUBIC)
    new = Resize(integers(7, 19, 12, 30, 36, 9), integers(30, 4, 9, 44, 33, 17), filters, (36, 44))
    found = steps(6, new=new).apply(canvas, torch.full_like(filters, RESIZE), (36, 44))
    assert_equal_images(found, resize_images(wide(canvas), new))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_noise_kernel_equals_torch_apart_from_rare_rounding(channels: int) -> None:
    canvas = Canvas(smooth(4, channels, 30, 24), integers(30, 20, 28, 9), integers(24, 24, 20, 23))
    gaussian, grey = integers(1, 1, 0, 0).bool(), integers(0, 1, 0, 1).bool()
    strength = torch.tensor([20.0, 9.0, 2.5, 1.5], device=DEVICE)
    noise = NoiseParameters(integers(1, 4_000_000_000, 77, 2**31), strength, gaussian, grey)
    found = steps(4, noise=noise).apply(canvas, torch.full_like(canvas.height, NOISE), (30, 24))
    padded = Canvas(F.pad(canvas.pixels.double(), (0, 20, 0, 10)), canvas.height, canvas.width)
    made = add_noise(padded, noise._replace(strength=strength.double())).pixels
    for number, (rows, columns) in enumerate(zip(canvas.height.tolist(), canvas.width.tolist(), strict=True)):
        here = number, slice(None), slice(rows), slice(columns)
        assert (found.pixels[here] - canvas.pixels[here]).abs().mean() > 1, "no noise was added"
        assert ((found.pixels[here] - made[here]).abs() > LEVELS).double().mean() < 0.005


@pytest.mark.parametrize("channels", [1, 3])
def test_the_jpeg_kernels_equal_torch_and_leave_unused_images_alone(channels: int) -> None:
    pixels = smooth(3, channels, 34, 40)
    canvas = Canvas(pixels.clone(), integers(33, 34, 15), integers(17, 40, 39))
    quality = integers(95, 50, 30)
    wanted = jpeg(wide(canvas), quality)
    compress_in_place(canvas, quality, integers(1, 0, 1).bool())
    assert torch.equal(canvas.pixels[1], pixels[1])
    for number, (rows, columns) in ((0, (33, 17)), (2, (15, 39))):
        here = number, slice(None), slice(rows), slice(columns)
        assert (canvas.pixels[here] - pixels[here]).abs().mean() > 0.1, "nothing was compressed"
        assert ((canvas.pixels[here] - wanted.pixels[here]).abs() > LEVELS).double().mean() < 0.01


@pytest.mark.slow
def test_images_degraded_by_the_kernels_equal_those_of_torch() -> None:
    images = smooth(2, 1, 24, 32) / 127.5 - 1
    numbers = torch.rand(2, NUM_NUMBERS, generator=torch.Generator().manual_seed(NUM_NUMBERS)).to(DEVICE)
    numbers[:, 2] = 0.0  # small blur kernels, and none later, because the interpreter is slow
    numbers[:, [17, 36]] = 0.99
    found = degrade(images, numbers, 2, steps=triton_steps).cpu()
    wanted = degrade(images.cpu(), numbers.cpu(), 2)
    assert found.shape == wanted.shape and found.std() > 0.1
    # One pixel that is rounded differently in the first round changes its neighbours in the next rounds.
    assert (found - wanted).abs().mean() * 127.5 < 1


def test_torch_replaces_kernels_that_cannot_be_compiled_and_prints_one_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Canvas:
        raise RuntimeError("no C compiler")

    usable, broken = second_order._Triton(usable=True), second_order.TORCH_STEPS._replace(apply_final=fail)
    monkeypatch.setattr(second_order, "_triton", usable)  # the last step fails, so the earlier steps ran already
    monkeypatch.setattr(
        second_order, "fastest_steps", lambda levels: broken if usable.usable else second_order.TORCH_STEPS
    )
    images, numbers = smooth(2, 3, 16, 16) / 127.5 - 1, torch.rand(2, NUM_NUMBERS, device=DEVICE)
    found = [degrade(images, numbers, 2) for _ in range(2)]
    wanted = degrade(images, numbers, 2, steps=second_order.TORCH_STEPS)
    assert all(torch.equal(one, wanted) for one in found)
    assert capsys.readouterr().out.count("no C compiler") == 1
