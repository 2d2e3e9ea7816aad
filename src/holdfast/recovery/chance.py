"""What is known of a quantity after a few observations: a guess with its spread, and how guesses add up.

Times are linear in a few things that can be counted (`Linear`: a Bayesian regression with a prior, which forgets),
a prediction is a `Guess`, and the bound of a sum is that of the sum and not the sum of bounds. Few observations
make wide bounds: a guess is Student's t with as many degrees of freedom as it has been seen, its prior included.
Pure, and in plain floats: a prediction takes microseconds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import msgspec

FLOOR_S = 0.05
"""Times below this are noise: spreads are relative to a time, or to this."""
_MOST_DF = 200.0
_MOST_FITS = 5
_MOST_STEPS = 40
_NEAR = 1e-6
"""A step of Newton's method that was so small leaves an error of about its square."""
_NORMAL = statistics.NormalDist()


class Guess(msgspec.Struct, frozen=True):
    """A time that is not known: its mean, and how far off it may be."""

    mean: float
    variance: float = 0.0
    """Squared scale of Student's t."""
    df: float = _MOST_DF
    extra: float = 0.0
    """What the worst case takes beyond the mean, whatever the spread."""

    def bound(self, confidence: float) -> float:
        """The time that is not passed with this confidence."""
        spread = math.sqrt(self.variance)
        return self.mean + self.extra + (t_quantile(confidence, self.df) * spread if spread else 0.0)

    def worst(self, confidence: float) -> tuple[float, float]:
        """What it takes at least in the worst case, and the square of what may come on top with this confidence."""
        spread = t_quantile(confidence, self.df) ** 2 * self.variance if self.variance else 0.0
        return self.mean + self.extra, spread

    def times(self, factor: float) -> Guess:
        """The same, so many times as long."""
        return Guess(self.mean * factor, self.variance * factor * factor, self.df, self.extra * factor)


class Sum(msgspec.Struct, frozen=True):
    """Times that are independent of each other, one after the other."""

    parts: tuple[Guess, ...] = ()

    @property
    def mean(self) -> float:
        return sum(part.mean for part in self.parts)

    def bound(self, confidence: float) -> float:
        """The time that all together don't pass with this confidence.

        Spreads add up as independent ones do, by their squares, each at its own bound. That is exact for normal
        parts and a little too much for heavier ones; and a part that grows never lowers it.

        >>> (
        ...     Sum((Guess(1.0, 9.0), Guess(2.0, 16.0))).bound(0.5),
        ...     Sum((Guess(1.0), Guess(2.0, extra=3.0))).bound(0.9),
        ... )
        (3.0, 6.0)
        """
        worst = [part.worst(confidence) for part in self.parts]
        return sum(fixed for fixed, _ in worst) + math.sqrt(sum(squared for _, squared in worst))


def t_quantile(confidence: float, df: float) -> float:
    """The quantile of Student's t; a little too large rather than too small.

    >>> round(t_quantile(0.975, 8), 2), round(t_quantile(0.999, 200), 2)
    (2.31, 3.13)
    """
    return _quantile(confidence, math.floor(df * 4) / 4 if df < 30 else float(math.floor(df)))


@functools.lru_cache(maxsize=8192)
def _quantile(confidence: float, df: float) -> float:
    if confidence <= 0.5:
        return 0.0
    df, wanted = max(1.0, df), 1 - confidence
    z = _NORMAL.inv_cdf(confidence)
    squared = z * z
    # The first terms of Fisher's expansion, which is near unless there are very few degrees of freedom.
    t = z * (1 + (squared + 1) / (4 * df) + ((5 * squared + 16) * squared + 3) / (96 * df * df))
    for _ in range(_MOST_STEPS):  # Newton's method on the logarithm, which is nearly straight far out
        tail = _beyond(t, df)
        step = tail / _density(t, df) * math.log(tail / wanted)
        t += step
        if abs(step) < _NEAR * t:
            break
    return t * (1 + 1e-8)


def _density(t: float, df: float) -> float:
    """Of Student's t."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    return float(scale * (1 + t * t / df) ** (-(df + 1) / 2))


def _beyond(t: float, df: float) -> float:
    """How likely Student's t is larger."""
    return 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(tiny, 1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            c = 1.0 + numerator / c
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            fraction *= d * c
        if abs(d * c - 1.0) < 1e-12:
            break
    return front * fraction / a


class Prior(msgspec.Struct, frozen=True):
    """What is thought of a linear time before it is seen."""

    weights: list[float]
    """The seconds of each feature."""
    spreads: list[float]
    """How far off each may be, as a share of it."""
    noise: float = 0.25
    """How far single times are off, as a share of them."""
    df: float = 6.0
    """So many observations the noise is thought to be known from."""
    keep: float = 0.97
    """What an observation still weighs after the next."""
    likely: bool = False
    """Whether what is sought is near to most times, as a share of each, and not their mean: one that took very long hardly counts."""


class Linear:
    """A time that is linear in features that are never negative; weights are never negative either.

    The spread of a prediction leaves out how the weights' errors depend on each other. Larger features make it
    larger then, always, so that more work never lowers a bound.
    """

    def __init__(self, prior: Prior, seen: Seen | None = None) -> None:
        self._prior = prior
        size = len(prior.weights)
        self._a0 = self._b0 = prior.df / 2  # the noise is counted in units of its prior
        blank = Seen([[0.0] * size for _ in range(size)], [0.0] * size, 0.0, 0.0, 0)
        fits = seen is not None and len(seen.xy) == size
        self.seen: Seen = seen if seen is not None and fits else blank
        self._solve()

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Take in one observation. What was seen of the like is forgotten for it; what it says nothing of is not.

        Epochs that are all as large tell what such an epoch takes. If all else were forgotten meanwhile, what a
        record takes by itself would be forgotten too.
        """
        usual_s = seconds if self._prior.likely else max(self.predict(features).mean, seconds / 3)
        weight = 1.0 / _squared(self._prior.noise * max(FLOOR_S, usual_s))
        faded = self._faded(features)
        size = range(len(features))
        self.seen = Seen(
            [[faded.xx[i][j] + weight * features[i] * features[j] for j in size] for i in size],
            [faded.xy[i] + weight * features[i] * seconds for i in size],
            faded.yy + weight * seconds * seconds,
            faded.weight + 1.0,
            faded.count + 1,
        )
        self._solve()

    def _faded(self, x: Sequence[float]) -> Seen:
        """What was seen, forgotten a little in the direction of some features."""
        seen, keep, size = self.seen, self._prior.keep, range(len(x))
        along = [_dot(row, x) for row in seen.xx]
        known = _dot(along, x)
        gone = (1.0 - keep) / known if known > 0 else 0.0
        told = _dot(x, seen.xy)
        xx = [[seen.xx[i][j] - gone * along[i] * along[j] for j in size] for i in size]
        xy = [seen.xy[i] - gone * along[i] * told for i in size]
        # The squares that the weights leave over are forgotten whole: they tell of the noise, which has no direction.
        left = max(0.0, seen.yy + self._squares(seen.xx, seen.xy))
        return Seen(xx, xy, keep * left - self._squares(xx, xy), keep * seen.weight, seen.count)

    def _squares(self, xx: Sequence[Sequence[float]], xy: Sequence[float]) -> float:
        """The squares left over by the weights, less those of the times themselves."""
        return _dot(self.weights, [_dot(row, self.weights) for row in xx]) - 2 * _dot(self.weights, xy)

    def _solve(self) -> None:
        """Spreads are shares: a weight that turns out larger may be off by more, or its prior would hold it for ever."""
        prior = self._prior.weights
        size = prior
        for _ in range(_MOST_FITS):
            self._fit([s * share for s, share in zip(size, self._prior.spreads, strict=True)])
            found = [max(pair) for pair in zip(prior, self.weights, strict=True)]
            if all(new <= 1.1 * old for new, old in zip(found, size, strict=True)):
                return
            size = found

    def _fit(self, spreads: Sequence[float]) -> None:
        seen, prior, size = self.seen, self._prior.weights, len(self._prior.weights)
        first = [1.0 / _squared(spread) for spread in spreads]
        p = [row.copy() for row in seen.xx]
        q = seen.xy.copy()
        y = seen.yy
        for i in range(size):
            p[i][i] += first[i]
            q[i] += first[i] * prior[i]
            y += first[i] * prior[i] * prior[i]
        free = list(range(size))
        inverse = _inverse(p)
        found = [_dot(row, q) for row in inverse]
        while (
            min(found) < 0 and max(found) >= 0
        ):  # weights that would be negative are nothing: fit the others alone
            free = [i for i, w in zip(free, found, strict=True) if w >= 0]
            inverse = _inverse([[p[i][j] for j in free] for i in free])
            found = [_dot(row, [q[i] for i in free]) for row in inverse]
        self.weights = [0.0] * size
        self._spread = [1.0 / p[i][i] for i in range(size)]
        for k, i in enumerate(free):
            self.weights[i], self._spread[i] = max(0.0, found[k]), inverse[k][k]
        left = max(0.0, y + self._squares(p, q))
        a = self._a0 + seen.weight / 2
        self._noise, self._df = (self._b0 + left / 2) / a, 2 * a

    def predict(self, features: Sequence[float]) -> Guess:
        """How long so much takes."""
        mean = unsure = 0.0
        for weight, spread, x in zip(self.weights, self._spread, features, strict=True):
            mean += weight * x
            unsure += spread * x * x
        own = _squared(self._prior.noise * max(FLOOR_S, mean))
        # Steady times make the noise small. They say nothing of what was never seen: its spread is not made smaller.
        return Guess(mean, self._noise * own + max(1.0, self._noise) * unsure, self._df)


class Seen(msgspec.Struct, frozen=True):
    """What a linear time has been taught, as sums that can be kept in a file."""

    xx: list[list[float]]
    xy: list[float]
    yy: float
    weight: float
    count: int

    def and_(self, other: Seen) -> Seen:
        """What both were taught, of the same features.

        >>> one = Seen([[4.0]], [2.0], 1.0, 1.0, 1)
        >>> one.and_(one)
        Seen(xx=[[8.0]], xy=[4.0], yy=2.0, weight=2.0, count=2)
        """
        return Seen(
            [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(self.xx, other.xx, strict=True)],
            [a + b for a, b in zip(self.xy, other.xy, strict=True)],
            self.yy + other.yy,
            self.weight + other.weight,
            self.count + other.count,
        )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def _squared(value: float) -> float:
    return max(1e-18, value * value)


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Of a small positive definite matrix, by Gauss and Jordan.

    >>> (
    ...     _inverse([[4.0]]),
    ...     _inverse([[2.0, 1.0], [1.0, 1.0]]),
    ...     _inverse([[2.0, 0.0, 0.0], [0.0, 2.0, 1.0], [0.0, 1.0, 1.0]]),
    ... )
    ([[0.25]], [[1.0, -1.0], [-1.0, 2.0]], [[0.5, 0.0, 0.0], [0.0, 1.0, -1.0], [0.0, -1.0, 2.0]])
    """
    size = len(matrix)
    if size == 2:  # most of them: the same steps, written out
        (a, b), (c, d) = matrix
        a = a if abs(a) > 1e-300 else 1e-300
        across, down = b / a, c / a
        left = d - c * across
        last = 1.0 / (left if abs(left) > 1e-300 else 1e-300)
        return [[1.0 / a + across * down * last, -across * last], [-down * last, last]]
    rows = [[*matrix[i], *(1.0 if i == j else 0.0 for j in range(size))] for i in range(size)]
    for i in range(size):
        pivot = rows[i][i] if abs(rows[i][i]) > 1e-300 else 1e-300
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
