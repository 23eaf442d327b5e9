"""Which statistics a capture keeps of a tensor, and which follow from those."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistic:
    """A statistic that a store keeps as a column of its records.

    Attributes:
        type: numpy's name of the column's type: `<i8` for a count (-1 where absent), `<f8` or `<f4` (NaN where absent).
        about: what it is, of the finite elements.
        on_request: kept only where it was asked for: it needs a sort, and cannot be merged.
    """

    type: str
    about: str = ""
    on_request: bool = False


STATISTICS: dict[str, Statistic] = {
    "nans": Statistic("<i8", "number of NaN elements"),
    "posinfs": Statistic("<i8", "number of elements that are +Inf"),
    "neginfs": Statistic("<i8", "number of elements that are -Inf"),
    "zeros": Statistic("<i8", "number of elements that are 0"),
    "min": Statistic("<f8", "smallest element"),
    "max": Statistic("<f8", "largest element"),
    "absmin": Statistic("<f8", "smallest absolute value"),
    "mean": Statistic("<f8", "mean"),
    "amean": Statistic("<f8", "mean of the absolute values"),
    "var": Statistic("<f8", "biased variance, M2 / n"),
    "skew": Statistic("<f4", "skewness, (M3 / n) / (M2 / n)^1.5"),  # the shape of a distribution needs no more
    "kurt": Statistic("<f4", "Pearson's kurtosis, (M4 / n) / (M2 / n)^2, which is 3 for a normal distribution"),
    "med": Statistic("<f8", "median: the mean of the two middle elements where their number is even", on_request=True),
    "mode": Statistic("<f8", "most frequent element, the smallest of several", on_request=True),
}
"""What a capture keeps, in column order; `tensors/columns.cpp` computes each from what rows hold."""

DERIVED_STATS: dict[str, str] = {
    "infs": "posinfs + neginfs",
    "absmax": "max(|min|, |max|)",
    "absmean": "|mean|",
    "uvar": "unbiased variance, var n / (n - 1)",
    "std": "sqrt(var)",
    "l2": "L2 norm, sqrt((var + mean^2) n)",
}
"""What follows from those, and how, in the order it is shown; `derived.FORMULAS` computes it."""
