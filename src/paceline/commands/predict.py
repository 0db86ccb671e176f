"""`paceline predict`: print the most likely classes for images, using a trained classifier."""

from __future__ import annotations

from contextlib import ExitStack

from paceline.commands.configure import choose_device
from paceline.core.files import check_new_file, new_file
from paceline.core.terminal import counted
from paceline.core.text import print_line
from paceline.inference.files import count_images, find_images, report_skipped
from paceline.inference.model import Model, classify_files, prediction_file
from paceline.inference.trained import check_use, read_stored
from paceline.runs.finished_run import last_finished


def predict(
    path: str, arguments: list[str], top: int, out: str, checkpoint: str, accelerator: str, *, overwrite: bool = False
) -> int:
    """Print the most likely classes for each image and, if `out` is given, also write them to that file.

    Return 1 if images were skipped.
    """
    target = check_new_file(out, (".csv",), overwrite=overwrite) if out else None
    device = choose_device("predict", accelerator)
    path = last_finished(path)
    stored = read_stored(path, checkpoint)
    check_use(stored, "predict", path)
    found = find_images(arguments)
    model = Model(stored, path, device)
    top, count = min(top, len(model.classes)), count_images(len(found.images))
    header = f"{stored.config.recipe_name} from {model.origin}: {len(model.classes)} classes; {count} on {device}"
    for line in (header, *found.notes):
        print_line(line)
    num_done = 0
    with ExitStack() as stack:
        write = None
        if target:
            temporary = stack.enter_context(new_file(target))
            write = stack.enter_context(prediction_file(temporary, top))
        classified = classify_files(model, found.images, top, found.skipped)
        for image, classes in counted(classified, "classifying images", len(found.images)):
            num_done += 1
            print_line(f"{image}: {', '.join(f'{name} ({probability:.1%})' for name, probability in classes)}")
            if write:
                write(image, classes)
    if target:
        print_line(f"{num_done:,} of {count} → {target}" if found.skipped else f"{count} → {target}")
    return report_skipped(found.skipped, num_done, found.ignored, target)
