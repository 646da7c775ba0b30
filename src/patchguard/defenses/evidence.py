"""`Evidence`: the one place where local logits are clipped, turned into votes and rounded to integers.

After this file there are no floats: from the integers on, sums are exact, order does not matter, CPU and GPU agree,
and a tie is a tie.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.errors import InputError

Kind = Literal["logits", "confidence", "vote", "prediction", "tanh"]

CEILING = 4096.0  # what "unbounded" logits are clipped to; networks stay below 200
LARGEST_SUM = 2**50  # any sum of cells stays below this, so that float64 matrix products are exact, too


@final
@dataclass(frozen=True, kw_only=True)
class EvidenceMap:
    """Integer evidence u_k(i) of class k in cell i, in units of ``1 / scale``.

    `lower` and `upper` bound what an unattacked cell can hold when the network is run again elsewhere
    (`Evidence.drift`); without drift they are `values` itself.
    """

    values: Int64[Tensor, "batch classes rows columns"]
    lower: Int64[Tensor, "batch classes rows columns"]
    upper: Int64[Tensor, "batch classes rows columns"]
    finite: Bool[Tensor, " batch"]
    low: int
    high: int
    scale: int
    bounded: bool  # whether [low, high] is the rule's own range, not only the numerical ceiling
    binary: bool  # whether a cell either votes for a class or does not

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        return (self.values.shape[2], self.values.shape[3])

    @property
    def classes(self) -> int:
        """Number of classes K."""
        return self.values.shape[1]

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, images: slice | Tensor) -> "EvidenceMap":
        """Return the evidence of some images."""
        values = self.values[images]
        lower, upper = (values if each is self.values else each[images] for each in (self.lower, self.upper))
        return replace(self, values=values, lower=lower, upper=upper, finite=self.finite[images])

    def with_values(self, values: Int64[Tensor, "batch classes rows columns"]) -> "EvidenceMap":
        """Return a map of the same kind with other contents and no drift, e.g. after an attack."""
        every = torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
        return replace(self, values=values, lower=values, upper=values, finite=every)


@final
@dataclass(frozen=True, kw_only=True)
class Evidence:
    r"""Turns local logits z into integer evidence, cell by cell.

    ============ ============================================ ==================
    kind         value of class k in a cell                   natural range
    ============ ============================================ ==================
    logits       z_k                                          unbounded
    confidence   p_k = softmax(z)_k                           [0, 1]
    vote         1 if p_k >= threshold else 0                 {0, 1}
    prediction   1 for the argmax of z (ties: smallest k)     {0, 1}
    tanh         tanh(0.05 z_k - 1)  (Clipped BagNet)         [-1, 1]
    ============ ============================================ ==================

    Logits are clipped to [low, high]. Values are rounded to multiples of ``2**-bits``; the rounding is part of the
    rule, so no certificate is charged for it. ``low=None`` and ``high=None`` mean unbounded: logits are then clipped
    to +-4096, far outside what a network gives, and that ceiling never counts as a bound on what an attack can do.

    `drift` is how far the value of an unattacked cell (the logit; p for confidence and vote; the tanh; the logit for
    prediction) may move between two runs of the network, on another device, batch size or precision, without voiding
    the certificate. Non-finite values are refused by `certify`; `predict` maps a value that is NaN or -inf to low and
    one that is +inf to high (a softmax over an infinite logit is NaN), cell by cell, so that a patch that makes a NaN
    cannot make the defense fail.
    """

    kind: str = "logits"
    low: float | None = 0.0
    high: float | None = None
    drift: float = 0.0
    threshold: float = 0.2
    bits: int = 16

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"`kind` must be one of {', '.join(get_args(Kind))}; got {self.kind!r}.")
        for name in ("low", "high", "drift", "threshold", "bits"):
            if isinstance(getattr(self, name), (bool, np.bool_)):
                raise InputError(f"`{name}` must be a number; got {getattr(self, name)!r}.")
        if not (math.isfinite(self.drift) and self.drift >= 0):
            raise InputError(f"`drift` must be a finite number of at least 0; got {self.drift}.")
        if not (isinstance(self.bits, int) and 0 <= self.bits <= 32):
            raise InputError(f"`bits` must be a whole number from 0 to 32; got {self.bits!r}.")
        if self.kind == "vote" and not 0 < self.threshold <= 1:
            raise InputError(f"`threshold` of a vote must lie in (0, 1]; got {self.threshold}.")
        if self.kind != "logits" and (self.low not in (0.0, None) or self.high is not None):
            raise InputError(f"`low` and `high` clip logits; {self.kind} has a range of its own. Leave them out.")
        low, high = self._range()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputError(f"`low` and `high` must be finite numbers or None; got {self.low} and {self.high}.")
        if not low < high:
            raise InputError(f"`low` must lie below `high`; got {low} and {high}.")
        if max(abs(low), abs(high)) * self.scale >= LARGEST_SUM:
            raise InputError(
                f"a ceiling of {max(abs(low), abs(high)):.3g} with {self.bits} bits would overflow 64-bit sums. "
                "Lower `high`, raise `low`, or use fewer `bits`."
            )

    @property
    def scale(self) -> int:
        """Integer units per unit of evidence."""
        return 1 if self.kind in ("vote", "prediction") else 2**self.bits

    @property
    def bounded(self) -> bool:
        """Whether the kind, or an explicit `low` and `high`, bounds what an attacked cell can hold."""
        return self.kind != "logits" or (self.low is not None and self.high is not None)

    def _range(self) -> tuple[float, float]:
        if self.kind != "logits":
            return (-1.0 if self.kind == "tanh" else 0.0), 1.0
        return (-CEILING if self.low is None else self.low), (CEILING if self.high is None else self.high)

    def __call__(self, local_logits: Float[Tensor, "batch classes rows columns"]) -> EvidenceMap:
        """Return the integer evidence of local logits."""
        check_map(local_logits)
        exact = local_logits if local_logits.dtype in (torch.float32, torch.float64) else local_logits.float()
        finite = torch.isfinite(exact.flatten(1).sum(1))
        clean = bool(finite.all())  # a finite sum has finite terms: one pass settles nearly all
        finite = finite if clean else torch.isfinite(exact).flatten(1).all(1)
        low, high = (round(bound * self.scale) for bound in self._range())
        cells = local_logits.shape[2] * local_logits.shape[3]
        if cells * max(abs(low), abs(high)) >= LARGEST_SUM:
            raise InputError(
                f"the sum of {cells} cells with a ceiling of {high / self.scale:.3g} and {self.bits} bits could "
                "overflow. Lower `high`, raise `low`, or use fewer `bits`."
            )
        if self.kind in ("vote", "prediction"):
            values, lower, upper = self._votes(exact, clean)
        else:
            values = self._round(self._value(exact), low, high, clean)
            slack = self._slack(high - low)
            lower = (values - slack).clamp_(min=low) if slack else values
            upper = (values + slack).clamp_(max=high) if slack else values
        return EvidenceMap(
            values=values,
            lower=lower,
            upper=upper,
            finite=finite,
            low=low,
            high=high,
            scale=self.scale,
            bounded=self.bounded,
            binary=self.kind in ("vote", "prediction"),
        )

    def _slack(self, span: int) -> int:
        """The drift in whole units: rounding may move two values that differ by d apart by one more unit.

        More than the whole range is no more drift, and must not overflow. No range has 2^60 units.
        """
        return min(math.floor(min(self.drift, 2.0**60) * 2**self.bits) + 1, span) if self.drift > 0 else 0

    def _value(self, local_logits: Tensor) -> Tensor:
        if self.kind == "tanh":
            return torch.tanh(0.05 * local_logits - 1)
        return local_logits if self.kind == "logits" else torch.softmax(local_logits, dim=1)

    def _round(self, value: Tensor, low: int, high: int, clean: bool) -> Tensor:
        # Multiplying by a power of two is exact, and overflow to infinity ends at the bound it passed.
        units = (value * 2**self.bits).clamp_(low, high).round_()
        whole = (units if clean else units.nan_to_num_(nan=low)).long()
        # A bound that floats do not hold exactly was clamped to its neighbor.
        held = value.dtype == torch.float64 or all(float(np.float32(bound)) == bound for bound in (low, high))
        bounded: Tensor = whole if held else whole.clamp(low, high)
        return bounded

    def _votes(self, local_logits: Tensor, clean: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Votes flip whole: one that drift could take away is not ours, one that it could add is against us."""
        if self.kind == "vote":
            units = self._round(torch.softmax(local_logits, dim=1), 0, 2**self.bits, clean)
            needed = max(1, round(self.threshold * 2**self.bits))  # rounded as p is, so that p >= threshold votes
            slack = self._slack(2**self.bits + 1)
            values, lower, upper = ((units + move >= needed).long() for move in (0, -slack, slack))
            return values, lower, upper
        ceiling = round(CEILING * 2**self.bits)
        units = self._round(local_logits, -ceiling, ceiling, clean)
        slack = self._slack(2 * ceiling + 1)
        winner = ties.argmax(units, dim=1)
        values = torch.nn.functional.one_hot(winner, units.shape[1]).movedim(-1, 1).contiguous()
        # A cell that holds NaN in every class votes for nobody; its one attacker could have chosen that, too.
        values = values * ~local_logits.isnan().all(1, keepdim=True)
        first, second = units.topk(2, dim=1).values.unbind(1)
        sure = (first - second > 2 * slack).unsqueeze(1)
        possible = units + 2 * slack >= first.unsqueeze(1)
        return values, (values * sure if slack else values), (possible.long() if slack else values)


def check_map(local_logits: Tensor) -> None:
    """Raise unless the tensor is (batch, classes, rows, columns) with at least two classes and one cell."""
    if local_logits.dim() != 4:
        raise InputError(
            "evidence must have four axes (batch, classes, rows, columns); got shape "
            f"{tuple(local_logits.shape)}. Give one image a batch axis; give bands a row axis of length 1."
        )
    if local_logits.shape[1] < 2:
        raise InputError(f"evidence must have at least two classes; got {local_logits.shape[1]}.")
    if min(local_logits.shape) < 1:
        raise InputError(f"evidence must not be empty; got shape {tuple(local_logits.shape)}.")
    if not local_logits.is_floating_point():
        raise InputError(f"local logits must be floating point; got {local_logits.dtype}. Call `.double()` on them.")
