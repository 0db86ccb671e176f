"""Generated images: FID, KID, precision and recall, and the Inception Score if the network has logits.

Protocol: images are rounded to 8 bits. All samples in the split are compared with `generated_images` generated images,
each from the random numbers for its position. FID uses unbiased covariances. KID (mean over consecutive subsets of
1,000) and precision and recall (third-nearest neighbours) use the first 10,000 real and generated images. The Inception
Score is the mean over ten splits. Unless the features are Inception 2015's, metric names include the network's name.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.fingerprint import fingerprint
from paceline.data.transforms import to_eight_bits
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.features.choice import choose_features
from paceline.evaluation.features.network import NAMES, FeatureNetwork
from paceline.evaluation.protocol import Protocol
from paceline.evaluation.statistics import (
    KERNEL_SUBSET,
    NEIGHBOURS,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_and_recall,
)
from paceline.evaluation.statistics_cache import find_statistics, store_statistics
from paceline.evaluation.sums import NUM_SPLITS, FeatureSums, Layout, Statistics, statistics_from, unflatten

NUM_ROWS = 10_000  # number of real (and of generated) images whose features are kept for KID, precision and recall


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
            "real": len(case.source),
            "rows": min(NUM_ROWS, len(case.source)),
        }
        self.real: Statistics | None = find_statistics(self.real_protocol, device)
        self.needs_samples = self.real is None

    def protocol(self) -> Protocol:
        estimators = f"KID of {KERNEL_SUBSET}, {NEIGHBOURS} neighbours, IS of {NUM_SPLITS} splits"
        return {
            **self.real_protocol,
            "made": self.case.count,
            "estimators": estimators,
            "seed": self.settings.seed,
        }

    def update_samples(self, batch: Batch) -> None:
        self._add(self.real_sums, batch["image"], batch["index"])

    def sample_sums(self) -> Tensor:
        return self.real_sums.flat()

    def end_samples(self, sums: Tensor) -> None:
        self.real = statistics_from(unflatten(sums, self.real_sums.layout))
        if find_statistics(self.real_protocol, self.device) is None:
            store_statistics(self.real_protocol, self.real)

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        self._add(self.made_sums, prediction["image"], batch["index"])

    def sums(self) -> Tensor:
        return self.made_sums.flat()

    def results(self, sums: Tensor) -> dict[str, float]:
        assert self.real is not None, "the real images must be processed first"
        by_name = unflatten(sums, self.made_sums.layout)
        made, real = statistics_from(by_name), self.real
        precision, recall = precision_and_recall(real.rows, made.rows)
        values = {
            "FID": frechet_distance(real.mean, real.covariance, made.mean, made.covariance),
            "KID": kernel_distance(real.rows, made.rows),
            "precision": precision,
            "recall": recall,
        }
        if self.network.num_classes:
            values["IS"] = inception_score(
                by_name["split_counts"], by_name["likelihoods"], by_name["negative_entropies"]
            )
        suffix = f"[{self.label}]" if self.label else ""
        return {f"{name}{suffix}": value for name, value in values.items()} | {"count": by_name["count"].item()}

    @cached_property
    def real_sums(self) -> FeatureSums:
        """The sums over real images."""
        return self._new_sums(len(self.case.source))

    @cached_property
    def made_sums(self) -> FeatureSums:
        """The sums over generated images."""
        return self._new_sums(self.case.count)

    def _new_sums(self, total: int) -> FeatureSums:
        layout = Layout(total, self.network.num_features, self.network.num_classes, min(NUM_ROWS, total))
        return FeatureSums(layout, self.device)

    def _add(self, sums: FeatureSums, images: Tensor, position: Tensor) -> None:
        sums.add(self.network(to_eight_bits(images), self.settings.feature_precision), position)


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
