"""What a quadrature of one training step knows for those that follow.

Gauss' rule lies above the truth, Gauss' and Radau's below. Where between the two the truth is depends on the spectrum's
shape and changes slowly as hyperparameters do: the shares of a thorough run make the first few iterations of later ones as
good as all of its own, as long as they hold. How fast they cease to is measured at every thorough run, on the shares of the
one before, and is part of what later estimates count as their error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

#: u^T log(M) u by Gauss' rule and by Gauss and Radau's, [*b, s] each: above and below the truth.
Rules = tuple[Tensor, Tensor]

#: Products of an estimate at the least: the second shows how far the first was off.
LEAST_PRODUCTS = 2
#: Of two successive estimates from the same old shares, the later one's error is so much of the earlier one's. Measured on
#: training steps of elevators and pol: .43 to .6, from the second product to the sixth.
FALL = 0.46
#: The least share of a correction that counts as its error. Measured as above, while hyperparameters move fast: an eighth.
CORRECTION_SHARE = 4
#: Estimates from the first shares of a run, whose drift nobody has measured yet.
FIRST_AGE = 5
#: Later shares serve at the most so many times as long as those that their drift was measured on.
LONGER = 2
#: So much of a measured drift is remembered at the next measurement: that an error crossed zero just then proves nothing.
REMEMBERED = 0.5


@dataclass(frozen=True)
class QuadratureShares:
    """Where between its upper and its lower rule the truth of a quadrature was, for estimates of similar systems.

    Attributes:
        values: Gauss' share of the two rules, [*b, s, k] by probe and iteration.
        error: of the run that they were learned from, which their estimates inherit, [*b].
        drift: the error of estimates per estimate since the shares were learned, [*b, j] by iteration from the second; not
            known yet for j = 0.
        age: [], estimates since they were learned.
        longest: [], the age up to which they serve.
        surplus: [], products beyond the least that estimates with these shares have taken, all together.
    """

    values: Tensor
    error: Tensor
    drift: Tensor
    age: Tensor
    longest: Tensor
    surplus: Tensor

    @classmethod
    def learned(
        cls, rules: Sequence[Rules], truth: Tensor, error: Tensor, before: "QuadratureShares | None" = None
    ) -> Self:
        """The shares of a thorough run: its rules by iteration, what they converged to [*b, s], and its mean's error [*b].

        The shares from before, where there are any, show their drift.
        """
        values = torch.stack([_share(rule, truth) for rule in rules], dim=-1)
        zero = torch.zeros((), dtype=torch.int64, device=values.device)
        if before is None or not (found := before._errors(rules, truth)):
            return cls(values, error, values[..., 0, :0], zero, zero + FIRST_AGE, zero)
        age = before.age + 1
        # An earlier estimate is not taken for better than a later one: its error happens to be about to change its sign.
        drift = torch.stack(found, dim=-1).flip(-1).cummax(-1).values.flip(-1) / age
        known = before.drift.shape[-1]
        if known:
            last = torch.arange(len(found), device=values.device).clamp_max(known - 1)
            drift = drift.maximum(REMEMBERED * before.drift[..., last])
        return cls(values, error, drift, zero, LONGER * age, zero)

    @property
    def are_worn(self) -> bool:
        """Whether to learn anew.

        The surplus has come to what that costs: of one that grows evenly, the cheapest moment. Or they are too old.
        """
        thorough = self.values.shape[-1] - LEAST_PRODUCTS
        return bool(self.surplus >= thorough) or bool(self.age >= self.longest)

    def used(self, products: int) -> Self:
        """After one more estimate."""
        return replace(self, age=self.age + 1, surplus=self.surplus + products - LEAST_PRODUCTS)

    def serve(self, rules: Sequence[Rules]) -> bool:
        """Whether an estimate can be made from these rules; from two iterations, and no more than were learned."""
        return LEAST_PRODUCTS <= len(rules) <= self.values.shape[-1]

    def estimate(self, rules: Sequence[Rules]) -> tuple[Tensor, Tensor]:
        """The quadrature's limit [*b, s], and the error [*b] of its mean that is due to the shares' age.

        Where the shares no longer quite hold, two successive iterations disagree: both are wrong in the same direction.
        """
        count = len(rules)
        last, samples = (self._at(rules, number) for number in (count - 2, count - 1))
        correction = (samples - last).mean(-1) * (FALL / (1 - FALL))
        error = correction.abs() / CORRECTION_SHARE
        known = self.drift.shape[-1]
        if known:
            error = error.maximum(self.drift[..., min(count - LEAST_PRODUCTS, known - 1)] * (self.age + 1))
        return samples + correction.unsqueeze(-1), error

    def _errors(self, rules: Sequence[Rules], truth: Tensor) -> list[Tensor]:
        """Of the estimates that could have been made, by iteration from the second; [*b] each."""
        counts = range(LEAST_PRODUCTS, min(len(rules), self.values.shape[-1]) + 1)
        return [(self.estimate(rules[:count])[0] - truth).mean(-1).abs() for count in counts]

    def _at(self, rules: Sequence[Rules], number: int) -> Tensor:
        upper, lower = rules[number]
        return lower + self.values[..., number] * (upper - lower)


def _share(rule: Rules, truth: Tensor) -> Tensor:
    upper, lower = rule
    gap = upper - lower
    share = torch.where(gap > 0, (truth - lower) / torch.where(gap > 0, gap, 1.0), 0.5)
    return share.clamp(0, 1)
