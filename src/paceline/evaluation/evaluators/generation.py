"""Generated images: FID, KID, precision, recall, density, coverage, and the Inception Score if there are logits.

Protocol: images are rounded to 8 bits. All samples in the split are compared with `generated_images` generated images,
each from the random numbers for its position. FID uses unbiased covariances. KID (mean over consecutive subsets of
1,000), precision and recall (third-nearest neighbours) and density and coverage (fifth-nearest neighbours) use the
first 10,000 real and generated images. Real images that are sorted by class are first put into a random order. If more
images are generated, `FID_10k` compares only the first 10,000 of them with all real images. The Inception Score is the
mean over ten splits. With `per_class`, FID is also computed for each class of a conditional generator. Unless the
features are Inception 2015's, metric names include the network's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError, too_few_classes
from paceline.data.file_lists import first_few
from paceline.data.fingerprint import fingerprint, fingerprint_of_files
from paceline.data.stream import to_eight_bits
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.features import NAMES, FeatureNetwork, choose_features
from paceline.evaluation.protocol import NUM_GENERATED, NUM_REAL, Protocol
from paceline.evaluation.statistics import (
    CLASS_FID,
    KERNEL_SUBSET,
    MIN_IMAGES,
    NEIGHBOURS,
    NUM_SPLITS,
    FeatureSums,
    Layout,
    Statistics,
    class_statistics_from,
    density_and_coverage,
    distances_by_class,
    find_statistics,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_and_recall,
    random_positions,
    statistics_from,
    store_statistics,
)

NUM_ROWS = 10_000  # number of real (and of generated) images whose features are kept for KID, precision and recall
MOST_PRINTED_CLASSES = 20  # with more classes, training prints only the mean FID over all classes


class Generation(Evaluator):
    """Compares the features of generated and real images, as computed by a feature network."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self.network = choose_features(settings, spec, device, case.open_run)
        self.network.require(settings.feature_precision, device)
        self.label = self.network.label
        self.notes = _check_counts(case, self.network, settings)
        self.real_protocol: Protocol = {
            **self.network.protocol(),
            "images": "8 bits",
            "arithmetic": NAMES[settings.feature_precision],
            "data": Path(settings.data).stem,
            "split": case.split,
            "size": f"{spec.width}×{spec.height}×{spec.channels}",
            "fingerprint": fingerprint(case.source),
            NUM_REAL: len(case.source),
            "rows": min(NUM_ROWS, len(case.source)),
        }
        if case.crop:
            self.real_protocol = {**self.real_protocol, "crop": f"{case.crop} pixels, at random places"}
        if not spec.pixel_format.is_full_range:
            self.real_protocol = {**self.real_protocol, "pixels": str(spec.pixel_format)}
        self.positions = random_positions(case.source)
        if self.positions is not None:
            self.real_protocol = {**self.real_protocol, "order": "random"}
            self.positions = self.positions.to(device)
        # The fingerprint in the protocol covers only some images of a folder; the statistics depend on all of them.
        self.cache_key: Protocol = {**self.real_protocol, "files": fingerprint_of_files(case.source)}
        self.real: Statistics | None = find_statistics(self.cache_key, device)
        self.by_class = settings.per_class
        if self.by_class and spec.num_classes < 2:
            raise too_few_classes("per_class", spec.num_classes)
        self.real_by_class: list[Statistics] = []
        self.needs_samples = self.real is None or self.by_class  # the sums of each class are too large for the cache

    def protocol(self) -> Protocol:
        # This text must stay as it is: runs whose texts differ cannot be compared, and a run cannot be resumed with
        # another text. Therefore, it does not mention density and coverage, which were added later.
        estimators = f"KID of {KERNEL_SUBSET}, {NEIGHBOURS} neighbours, IS of {NUM_SPLITS} splits"
        return {
            **self.real_protocol,
            NUM_GENERATED: self.case.count,
            "estimators": estimators,
            "seed": self.settings.seed,
        }

    @classmethod
    def texts(cls, metrics: Mapping[str, float], spec: DataSpec) -> dict[str, str]:
        """Return the metrics to print; with many classes, the FID of each class would fill the terminal."""
        texts = super().texts(metrics, spec)
        if spec.num_classes <= MOST_PRINTED_CLASSES:
            return texts
        return {name: text for name, text in texts.items() if not name.startswith(CLASS_FID)}

    def update_samples(self, batch: Batch) -> None:
        position = batch["index"] if self.positions is None else self.positions[batch["index"]]
        self._add(self.real_sums, batch["image"], position, batch.get("label"))

    def sample_sums(self) -> Tensor:
        return self.real_sums.flat()

    def end_samples(self, sums: Tensor) -> None:
        by_name = self.real_sums.split(sums)
        self.real = statistics_from(by_name)
        self.real_by_class = class_statistics_from(by_name) if self.by_class else []
        if find_statistics(self.cache_key, self.device) is None:
            store_statistics(self.cache_key, self.real)

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        if self.by_class and "label" not in prediction:
            raise UserError("per_class=on: the generator is not conditional on classes; use per_class=off")
        self._add(self.made_sums, prediction["image"], batch["index"], prediction.get("label"))

    def sums(self) -> Tensor:
        return self.made_sums.flat()

    def results(self, sums: Tensor) -> dict[str, float]:
        assert self.real is not None, "the real images must be processed first"
        by_name = self.made_sums.split(sums)
        made, real = statistics_from(by_name), self.real
        precision, recall = precision_and_recall(real.rows, made.rows)
        density, coverage = density_and_coverage(real.rows, made.rows)
        values = {
            "FID": frechet_distance(real.mean, real.covariance, made.mean, made.covariance),
            "KID": kernel_distance(real.rows, made.rows),
            "precision": precision,
            "recall": recall,
            "density": density,
            "coverage": coverage,
        }
        if self.case.count > NUM_ROWS:
            values["FID_10k"] = frechet_distance(real.mean, real.covariance, made.rows.mean(0), made.rows.T.cov())
        if self.by_class:
            distances, missing = distances_by_class(
                self.real_by_class, class_statistics_from(by_name), self.spec.classes
            )
            values |= distances
            if missing:
                classes = f"{len(missing):,} of {self.spec.num_classes:,} classes ({first_few(missing)})"
                fewer = f"fewer than {MIN_IMAGES} real or generated images each"
                self.notes += (f"FID by class: not measured for {classes}, with {fewer}",)
        named = {_labelled(name, self.label): value for name, value in values.items()}
        if self.network.num_classes:
            label = self.network.score_label or self.label
            named[_labelled("IS", label)] = inception_score(
                by_name["split_counts"], by_name["likelihoods"], by_name["negative_entropies"]
            )
        return named | {"count": by_name["count"].item()}

    @cached_property
    def real_sums(self) -> FeatureSums:
        """The sums over real images."""
        return self._new_sums(len(self.case.source))

    @cached_property
    def made_sums(self) -> FeatureSums:
        """The sums over generated images."""
        return self._new_sums(self.case.count)

    def _new_sums(self, total: int) -> FeatureSums:
        network, num_labels = self.network, self.spec.num_classes if self.by_class else 0
        layout = Layout(total, network.num_features, network.num_classes, min(NUM_ROWS, total), num_labels)
        return FeatureSums(layout, self.device)

    def _add(self, sums: FeatureSums, images: Tensor, position: Tensor, label: Tensor | None) -> None:
        sums.add(self.network(to_eight_bits(images), self.settings.feature_precision), position, label)


def _labelled(name: str, label: str) -> str:
    return f"{name}[{label}]" if label else name


def _check_counts(case: Case, network: FeatureNetwork, settings: RunSettings) -> tuple[str, ...]:
    """Return warnings about too few images; raise UserError if there are fewer images than features."""
    fewest = min(case.count, len(case.source))
    counts = f"{len(case.source):,} real in split {case.split!r}, {case.count:,} generated"
    which = f"{fewest:,} images ({counts})"
    if fewest < 2:
        raise UserError(f"too few images to evaluate ({counts}); use at least 2 of each kind")
    if fewest < network.num_features and settings.few_images == "fail":
        raise UserError(
            f"{which} are too few to estimate the covariance of {network.num_features:,} features; use more "
            "images, or accept unreliable metrics with --set few_images=allow"
        )
    note = network.few_images_note(fewest, which)
    return (note,) if note else ()
