"""The oracle: on small grids it writes every content into every window and looks for a proof that fails.

    from patchguard.oracle import check_defense
    check_defense(MyRule())            # raises a `Counterexample` that shows what the rule got wrong

With pytest, the fixture `check_defense` is the same function. Regions are sets of cells here and attacks are lists: the
search shares no code with the sums, bounds and shortcuts of the defenses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeAlias, final

import numpy as np
import torch

from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows

Rule: TypeAlias = Callable[[np.ndarray], np.ndarray]  # (contents, classes, cells) -> label, or -1 for "alert"


# -- regions -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Geometry:
    """A small grid of cells, on which an axis may wrap around."""

    name: str
    grid: tuple[int, int]
    wrap: tuple[bool, bool] = (False, False)

    @property
    def cells(self) -> int:
        """How many cells it has."""
        return self.grid[0] * self.grid[1]

    def boxes(self, size: tuple[int, int]) -> np.ndarray:
        """Return all boxes of one size as rows of a 0/1 matrix, by walking over every start."""
        boxes: list[np.ndarray] = []
        for top, left in product(range(self.grid[0]), range(self.grid[1])):
            rows, columns = (
                [(start + k) % n if around else start + k for k in range(length)]
                for start, length, n, around in zip((top, left), size, self.grid, self.wrap, strict=True)
            )
            if max(rows) >= self.grid[0] or max(columns) >= self.grid[1]:
                continue
            box = np.zeros(self.grid, dtype=np.int64)
            for r, c in product(rows, columns):
                box[r, c] = 1
            if not any((box.reshape(-1) == other).all() for other in boxes):
                boxes.append(box.reshape(-1))
        return np.array(boxes)

    def windows(self, size: tuple[int, int], count: int = 1) -> Windows:
        """Return the same boxes as windows of the package."""
        return Windows.sliding(grid=self.grid, size=size, wrap=self.wrap, count=count)


def unions(boxes: np.ndarray, count: int) -> np.ndarray:
    """Return all unions of `count` different boxes."""
    return np.array([boxes[list(chosen)].max(0) for chosen in combinations(range(len(boxes)), count)])


# -- attacks -----------------------------------------------------------------------------------------------------------


def contents(classes: int, cells: int, alphabet: tuple[int, ...]) -> np.ndarray:
    """Return every way to fill `cells` cells of every class with values of the alphabet."""
    return np.array(list(product(alphabet, repeat=classes * cells)), dtype=np.int64).reshape(-1, classes, cells)


def attacked(evidence: np.ndarray, region: np.ndarray, fillings: dict[int, np.ndarray]) -> np.ndarray:
    """Return the evidence (classes, cells) with each filling of the region."""
    filling = fillings[int(region.sum())]
    maps = np.repeat(evidence[None], len(filling), 0)
    maps[:, :, region.astype(bool)] = filling
    return maps


def broken(
    evidence: np.ndarray, regions: np.ndarray, rule: Rule, label: int, alphabet: tuple[int, ...], top: int = 1
) -> np.ndarray:
    """For each region, whether some contents of it make the rule answer another label (an alert does not count)."""
    sizes = {int(n) for n in regions.sum(1)}
    fillings = {n: contents(len(evidence), n, alphabet) for n in sizes}
    answers = [rule(attacked(evidence, region, fillings)) for region in regions]
    return np.array([((answer != label) & (answer != -1)).any() for answer in answers])


def random_maps(
    generator: np.random.Generator,
    count: int,
    classes: int,
    cells: int,
    low: int,
    high: int,
    lead: tuple[float, float] = (0.4, 1.3),
) -> Iterator[np.ndarray]:
    """Draw evidence with one favored class, so that certified and broken cases both occur."""
    for _ in range(count):
        u = generator.integers(low, high + 1, (classes, cells))
        weak = generator.random((classes, cells)) < generator.choice([0.3, 0.6, 0.8, 0.9, 0.97, 1.0])
        u = np.where(weak, low, u)
        favored = generator.integers(classes)
        strong = generator.random(cells) < generator.uniform(*lead)
        u[favored] = np.where(strong, high, u[favored])
        yield u


# -- what is tried -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Case:
    """Windows of a small grid, the same as sets of cells, and other masks that a rule may be made with."""

    name: str
    classes: int
    windows: Windows
    regions: np.ndarray
    masks: tuple[Windows, ...]


@final
@dataclass(frozen=True)
class Kind:
    """A range of evidence: an attacked cell holds low to high, images are drawn from low or -2 up to `drawn`."""

    name: str
    low: int
    high: int
    drawn: int
    scale: int = 1
    bounded: bool = True
    binary: bool = False

    @property
    def least(self) -> int:
        """The smallest value that is drawn."""
        return max(self.low, -self.drawn)

    @property
    def alphabet(self) -> tuple[int, ...]:
        """What is written into attacked cells: both ends, and a value between them."""
        return tuple(sorted({self.low, (self.least + self.drawn) // 2, self.high}))


def _make_cases() -> Iterator[Case]:
    line, circle = Geometry("line", (1, 5)), Geometry("circle", (1, 5), (False, True))
    square = Geometry("square", (3, 3))
    for geometry in (line, circle):
        masks = (geometry.windows((1, 3)), geometry.windows((1, 1)))
        yield Case(geometry.name, 3, geometry.windows((1, 2)), geometry.boxes((1, 2)), masks)
    yield Case("square", 2, square.windows((2, 2)), square.boxes((2, 2)), (square.windows((2, 3)),))
    # As at the border of an image, where a patch touches fewer cells.
    uneven = Windows(grid=(1, 5), rows=((0, 1),), columns=((0, 1), (0, 2), (2, 4), (3, 5)))
    regions = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
    yield Case("line, windows of several sizes", 3, uneven, regions, (line.windows((1, 2)),))
    pairs = line.windows((1, 1), count=2)
    yield Case("line, two patches", 3, pairs, unions(line.boxes((1, 1)), 2), (line.windows((1, 2), count=2),))


KINDS = (
    Kind("bounded evidence", 0, 4, 4, scale=4),
    Kind("signed evidence", -2, 2, 2),
    Kind("votes", 0, 1, 1, binary=True),
    Kind("evidence without an upper bound", 0, 4096, 4, bounded=False),
    Kind("evidence without bounds", -4096, 4096, 4, bounded=False),
)


# -- the search --------------------------------------------------------------------------------------------------------


@final
class Counterexample(AssertionError):
    """A proof that fails: the message shows the evidence, the window, and contents that change the answer."""


def check_defense(
    defense: Defense[Any] | type[Defense[Any]], *, images: int = 300, deepest: int = 6, seed: int = 0
) -> int:
    """Look for a proof of the defense that fails; return how many attacks were tried.

    Small grids, lines and circles; one window and two; evidence of every range that the defense accepts, with and
    without drift; masks as large as the windows, larger and smaller. For each, `images` random images are certified.
    For the `deepest` smallest positive margins, every content of every window is tried, from an alphabet with both ends
    of the range, and the cells outside move as far as drift lets them. A certified label that changes raises
    `Counterexample`, and so does a class that is certified though it is not the answer. A defense that certifies
    nothing at all raises AssertionError: there was nothing to test.

    This finds mistakes and proves nothing: the theorem is yours to prove.
    """
    generator = np.random.default_rng(seed)
    tried = accepted = 0
    for case, kind, drift in product(_make_cases(), KINDS, (0, 1)):
        rules = [
            each.fitted(masks) if isinstance(each := defense, type) else each.fit_to(masks)
            for masks in (case.windows, *case.masks)
        ]
        evidence = _draw(generator, case, kind, drift, images)
        for rule in dict.fromkeys(rules):
            highest = case.classes - 1 if rule.largest_top_k is None else min(rule.largest_top_k, case.classes - 1)
            for top_k in range(1, highest + 1):
                try:
                    rule.validate(evidence, case.windows, top_k)
                except InputError:  # what a defense refuses, it need not prove
                    continue
                accepted += 1
                tried += _try_case(rule, case, kind, evidence, top_k, deepest, generator)
    name = defense.__name__ if isinstance(defense, type) else repr(defense)
    assert accepted, f"{name} accepts none of the evidence and windows of the oracle; nothing was tested"
    assert tried, f"{name} certifies none of the images of the oracle; nothing was tested"
    return tried


def _draw(generator: np.random.Generator, case: Case, kind: Kind, drift: int, images: int) -> EvidenceMap:
    """Draw images of three kinds in turn; some cells may drift.

    One class is favored; or all are drawn alike; or one is everywhere and its rivals are strong in a few cells.
    """
    cells = case.windows.grid[0] * case.windows.grid[1]
    led = random_maps(generator, images, case.classes, cells, kind.least, kind.drawn)
    close = generator.integers(kind.least, kind.drawn + 1, (images, case.classes, cells))
    sparse = np.where(generator.random(close.shape) < generator.random((images, case.classes, 1)), close, kind.least)
    sparse[np.arange(images), generator.integers(case.classes, size=images)] = kind.drawn
    values = np.stack([(u, close[number], sparse[number])[number % 3] for number, u in enumerate(led)])
    moves = drift * (generator.random(values.shape) < 0.3)
    shape = (images, case.classes, *case.windows.grid)
    lower, value, upper = (
        torch.from_numpy(np.clip(values + step, kind.low, kind.high)).view(shape) for step in (-moves, 0, moves)
    )
    return EvidenceMap(
        values=value,
        lower=lower if drift else value,
        upper=upper if drift else value,
        finite=torch.ones(images, dtype=torch.bool),
        low=kind.low,
        high=kind.high,
        scale=kind.scale,
        bounded=kind.bounded,
        binary=kind.binary,
    )


def _try_case(
    rule: Defense[Any],
    case: Case,
    kind: Kind,
    evidence: EvidenceMap,
    top_k: int,
    deepest: int,
    generator: np.random.Generator,
) -> int:
    for label in range(case.classes):
        margin = rule.certify(evidence, case.windows, label, top_k).margin
        wrong = ((margin > 0) & _falls(rule, evidence, torch.full_like(margin, label).long(), top_k)).nonzero()
        if len(wrong):
            image = int(wrong[0])
            raise Counterexample(
                f"{rule} certifies class {label} (margin {float(margin[image]):g}), which is not its answer\n"
                + _show(case, kind, evidence, image, top_k)
            )
    certificate = rule.certify(evidence, case.windows, None, top_k)
    order = certificate.margin.argsort()
    chosen = [image for image in order.tolist() if certificate.margin[image] > 0][:deepest]
    sizes = {int(size) for size in case.regions.sum(1)}
    fillings = {size: contents(case.classes, size, kind.alphabet) for size in sizes}
    tried = 0
    for image in chosen:
        label = int(certificate.label[image])
        for start, region in product(_moved_by_drift(evidence, image, label, generator), case.regions):
            maps = torch.from_numpy(attacked(start, region, fillings)).view(-1, case.classes, *case.windows.grid)
            after = evidence.with_values(maps)
            falls = _falls(rule, after, torch.full((len(maps),), label), top_k).nonzero()
            tried += len(maps)
            if len(falls):
                worst = int(falls[0])
                answer = int(rule.predict(after[worst : worst + 1]).label)
                raise Counterexample(
                    f"{rule} certifies class {label} (margin {float(certificate.margin[image]):g}), but contents of "
                    f"one window {'make it' if top_k == 1 else 'push it out: the best is'} {answer}\n"
                    + _show(case, kind, evidence, image, top_k, region, maps[worst])
                )
    return tried


def _falls(rule: Defense[Any], evidence: EvidenceMap, label: torch.Tensor, top_k: int) -> torch.Tensor:
    """Whether the label is not among the k best (ties: smallest class first) and no alert says so."""
    prediction = rule.predict(evidence)
    if top_k == 1:
        falls = prediction.label != label
    else:
        own = prediction.scores.gather(1, label[:, None])
        first = torch.arange(evidence.classes) < label[:, None]
        falls = ((prediction.scores > own) | ((prediction.scores == own) & first)).sum(1) >= top_k
    return falls if prediction.alert is None else falls & ~prediction.alert


def _moved_by_drift(
    evidence: EvidenceMap, image: int, label: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the cells (classes, cells) as they are, at the worst for the label, and at random within their drift."""
    values, lower, upper = (
        each[image].flatten(1).numpy() for each in (evidence.values, evidence.lower, evidence.upper)
    )
    yield values
    if (lower < upper).any():
        worst = upper.copy()
        worst[label] = lower[label]
        yield worst
        yield generator.integers(lower, upper + 1)


def _show(
    case: Case,
    kind: Kind,
    evidence: EvidenceMap,
    image: int,
    top_k: int,
    region: np.ndarray | None = None,
    after: torch.Tensor | None = None,
) -> str:
    """Return everything that repeats a counterexample, in words and small tables."""
    lines = [
        f"case: {case.name}; {kind.name}, from {kind.low} to {kind.high} in units of 1/{kind.scale}; top_k {top_k}",
        f"windows: {case.windows}",
        f"evidence of each class: {evidence.values[image].tolist()}",
    ]
    if evidence.lower is not evidence.values:
        lines += [f"lower: {evidence.lower[image].tolist()}", f"upper: {evidence.upper[image].tolist()}"]
    if region is not None and after is not None:
        lines += [
            f"attacked cells: {region.reshape(case.windows.grid).tolist()}",
            f"evidence after the attack: {after.tolist()}",
        ]
    return "\n".join(lines)
