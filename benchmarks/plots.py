"""Line plots as SVG, for pages of results: two axes, a line with points for each series, and a legend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 48
COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#8250df", "#bf8700", "#57606a")


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """With `is_log`, the horizontal axis doubles from mark to mark. The vertical one begins at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log: bool = False

    def svg(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        yield f'<text x="{LEFT}" y="20" font-size="14">{escape(self.title)}</text>'
        for value in self._x_marks():
            x = self._x(value)
            yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#d0d7de"/>'
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,g}</text>'
        for value in self._y_marks():
            y = self._y(value)
            yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(self.x_label)}</text>'
        yield f'<text transform="rotate(-90)" x="{-HEIGHT / 2:.0f}" y="16" text-anchor="middle">{escape(self.y_label)}</text>'
        for number, series in enumerate(self.series):
            colour = COLOURS[number % len(COLOURS)]
            places = [(self._x(x), self._y(y)) for x, y in series.points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
            y = TOP + 14 + 18 * number
            yield f'<text x="{WIDTH - RIGHT + 12}" y="{y}" fill="{colour}">{escape(series.name)}</text>'
        yield "</svg>"

    @property
    def _xs(self) -> list[float]:
        return sorted({x for series in self.series for x, _ in series.points})

    @property
    def _top(self) -> float:
        """The highest mark."""
        return self._y_marks()[-1]

    def _x_marks(self) -> list[float]:
        return self._xs

    def _y_marks(self) -> list[float]:
        highest = max((y for series in self.series for _, y in series.points), default=1.0) or 1.0
        power = 10.0 ** floor(log10(highest))
        step = next(power * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if highest <= 6 * power * part)
        return [step * number for number in range(ceil(highest / step) + 1)]

    def _x(self, value: float) -> float:
        xs = [log2(x) for x in self._xs] if self.is_log else self._xs
        place = log2(value) if self.is_log else value
        share = 0.5 if xs[0] == xs[-1] else (place - xs[0]) / (xs[-1] - xs[0])
        return LEFT + share * (WIDTH - RIGHT - LEFT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._top * (HEIGHT - BOTTOM - TOP)
