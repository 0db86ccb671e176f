"""The result of `paceline verify` and `paceline.verify`: how much the strategies differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """How much one network differs between a strategy and the reference strategy.

    Attributes:
        strategy: The strategy that is compared with the first strategy.
        kind: "gradients" or "gradients of PHASE" at the first step, or "weights" after the last step.
        network: The name of the network.
        value: max |a − b| ÷ max |b| over all tensors in the network, where b is from the first strategy.
        tolerance: The largest allowed value.
        worst: The name of the first tensor above the tolerance, or "".

    Examples:
        >>> paceline.Difference("ddp", "weights", "classifier", value=2.2e-16, tolerance=1e-9, worst="")
        Difference(ddp, weights of classifier, 2.2e-16, ok)
    """

    strategy: str
    kind: str
    network: str
    value: float
    tolerance: float
    worst: str

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.value <= self.tolerance

    @property
    def what(self) -> str:
        """What was compared, for example "weights of classifier"."""
        return f"{self.kind} {'in' if ' of ' in self.kind else 'of'} {self.network}"

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else f"above {self.tolerance:.0e} in {self.worst}"
        return f"Difference({self.strategy}, {self.what}, {self.value:.1e}, {verdict})"


@dataclass(frozen=True)
class VerifyResult:
    """Whether all strategies produce the same weights; returned by `paceline.verify`.

    `bool(result)` is the same as `result.ok`.

    Attributes:
        differences: One difference for each strategy (except the first), network and kind.

    Examples:
        >>> same = paceline.Difference("ddp", "weights", "classifier", value=2.2e-16, tolerance=1e-9, worst="")
        >>> result = paceline.VerifyResult((same,))
        >>> result
        VerifyResult(ok, 1 difference, largest 2.2e-16)
        >>> assert result
    """

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether every difference is within its tolerance."""
        return all(one.ok for one in self.differences)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        failed = [one for one in self.differences if not one.ok]
        count = len(self.differences)
        if failed:
            return f"VerifyResult({len(failed)} of {count} differences above tolerance, first {failed[0]})"
        largest = max((one.value for one in self.differences), default=0.0)
        return f"VerifyResult(ok, {count} difference{'s' if count > 1 else ''}, largest {largest:.1e})"
