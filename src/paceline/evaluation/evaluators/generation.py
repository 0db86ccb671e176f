"""Generated pictures: FID, KID, precision and recall, and the Inception Score where the network has logits.

The protocol: pictures in 8 bits; all samples of the split against `generated_images` generated ones, each from the
random numbers of its position; the Fréchet distance with unbiased covariances; of the first 10,000 of each the
kernel distance (mean over subsets of 1,000, in order) and precision and recall (third neighbours); the Inception
Score as the mean over ten splits. Numbers by other features than the Inception of 2015 are named with the network.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.fingerprint import fingerprint
from paceline.data.transforms import to_eight_bits
from paceline.evaluation import kept_statistics
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.features.choice import choose_features
from paceline.evaluation.features.network import NAMES
from paceline.evaluation.statistics import (
    KERNEL_SUBSET,
    NEIGHBOURS,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_and_recall,
)
from paceline.evaluation.sums import NUM_SPLITS, FeatureSums, Layout, Statistics, statistics_from, unflatten

NUM_ROWS = 10_000  # pictures of each kind whose features are kept, for KID, precision and recall


class Generation(Evaluator):
    """Made pictures against real ones, by the features of a stated network."""

    def __init__(self, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(spec, device, settings)
        self.real: Statistics | None = None

    def begin(self, case: Case) -> None:
        self.case, settings = case, self.settings
        self.network = choose_features(settings, self.spec, self.device, case.open_run)
        self.network.require(settings.feature_precision, self.device)
        self.label = self.network.label
        self.notes = _check_counts(case, self.network.num_features, self.network.warn_below, settings)
        self.real_protocol = {
            **self.network.protocol(),
            "pictures": "8 bits",
            "arithmetic": NAMES[settings.feature_precision],
            "data": Path(settings.data).stem,
            "split": case.split,
            "size": f"{self.spec.width}×{self.spec.height}×{self.spec.channels}",
            "fingerprint": fingerprint(case.source),
            "real": len(case.source),
            "rows": min(NUM_ROWS, len(case.source)),
        }
        self.real = kept_statistics.find(self.real_protocol, self.device)
        self.needs_samples = self.real is None

    def protocol(self) -> dict[str, Any]:
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
        if kept_statistics.find(self.real_protocol, self.device) is None:
            kept_statistics.keep(self.real_protocol, self.real)

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        self._add(self.made_sums, prediction["image"], batch["index"])

    def sums(self) -> Tensor:
        return self.made_sums.flat()

    def results(self, sums: Tensor) -> dict[str, float]:
        assert self.real is not None, "the real pictures come first"
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
        """What real pictures add up to."""
        return self._new_sums(len(self.case.source))

    @cached_property
    def made_sums(self) -> FeatureSums:
        """What made pictures add up to."""
        return self._new_sums(self.case.count)

    def _new_sums(self, total: int) -> FeatureSums:
        layout = Layout(total, self.network.num_features, self.network.num_classes, min(NUM_ROWS, total))
        return FeatureSums(layout, self.device)

    def _add(self, sums: FeatureSums, pictures: Tensor, position: Tensor) -> None:
        sums.add(self.network(to_eight_bits(pictures), self.settings.feature_precision), position)


def _check_counts(case: Case, num_features: int, warn_below: int, settings: RunSettings) -> tuple[str, ...]:
    fewest = min(case.count, len(case.source))
    which = f"{fewest:,} pictures ({len(case.source):,} of split {case.split!r} against {case.count:,} generated)"
    if fewest < 2:
        raise UserError(f"{which} are too few to judge")
    if fewest < num_features:
        if settings.few_images == "refuse":
            raise UserError(
                f"{which} are too few for the covariance of {num_features:,} features; take more pictures, or "
                "accept a meaningless number with --set few_images=allow"
            )
        return (f"warning: {which} are fewer than the {num_features:,} features; the numbers mean little",)
    if fewest < min(warn_below, 5 * num_features):
        return (f"warning: {which}: with so few, FID is biased upwards; compare it only at equal counts",)
    return ()
