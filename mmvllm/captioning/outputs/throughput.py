"""Measures images or clips per second over the duration of a job, and draws them as an SVG figure."""

import math
from array import array
from dataclasses import dataclass

import numpy as np

MAX_BINS = 120
IMAGES_PER_BIN = 10  # at least, on average
PAUSE_S = 600.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Images per second in bins of `bin_s` seconds, and the times, in seconds, at which a pause was cut out."""

    rates: np.ndarray
    bin_s: float
    pauses: np.ndarray


def measure_throughput(times: array) -> Throughput | None:
    """Compute the rate from the `times`, in seconds, at which images were finished; None if there are too few.

    A pause of more than PAUSE_S, as between two runs, is replaced by the median time between two images.
    """
    gaps = np.diff(np.sort(np.asarray(times, dtype=np.float64)))
    num_bins = min(MAX_BINS, len(gaps) // IMAGES_PER_BIN)
    if num_bins < 2:
        return None
    is_pause = gaps > PAUSE_S
    gaps[is_pause] = np.median(gaps)
    seconds = np.concatenate([[0.0], np.cumsum(gaps)])
    if seconds[-1] < 1e-6:
        return None
    # The count is interpolated between two finished images, so that bins can be shorter than a batch.
    moments, counts = np.unique(seconds, return_counts=True)
    edges = np.linspace(0, seconds[-1], num_bins + 1)
    done = np.interp(edges, moments, np.cumsum(counts))
    return Throughput(np.diff(done) / edges[1], float(edges[1]), seconds[1:][is_pause])


LEFT, TOP, RIGHT, BOTTOM = 64, 12, 708, 168  # of the plot, in a drawing of 720 x 204 units
UNITS = ((1, "s"), (60, "min"), (3600, "h"))


def draw_throughput(curve: Throughput, noun: str = "Images") -> str:
    """Return a `<figure>` with the curve as inline SVG."""
    total_s = curve.bin_s * len(curve.rates)
    unit_s, unit = [each for each in UNITS if each[0] == 1 or total_s > 2 * each[0]][-1]
    top = 1.1 * float(curve.rates.max())

    def x(seconds: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * seconds / total_s:.1f}"

    def y(rate: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * rate / top:.1f}"

    rates = curve.rates.tolist()
    places = [0.0, *((i + 0.5) * curve.bin_s for i in range(len(rates))), total_s]
    line = " ".join(f"{x(at)},{y(rate)}" for at, rate in zip(places, [rates[0], *rates, rates[-1]], strict=True))
    rows = "".join(
        f'<path class="grid" d="M{LEFT} {y(tick)}H{RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{y(tick)}" dy=".35em" text-anchor="end">{tick:,g}</text>\n'
        for tick in _ticks(top, 4)
    )
    columns = "".join(
        f'<text x="{x(tick * unit_s)}" y="{BOTTOM + 28}" text-anchor="middle">{tick:,g} {unit}</text>\n'
        for tick in _ticks(total_s / unit_s, 6)
    )
    pauses = "".join(f'<path class="pause" d="M{x(at)} {TOP}V{BOTTOM}"/>\n' for at in curve.pauses.tolist())
    caption = f"{noun} per second over {total_s / unit_s:.3g} {unit}"
    cut = "; dotted: a pause was cut out" if pauses else ""
    return (
        f"<figure>\n<figcaption>{caption}{cut}</figcaption>\n"
        f'<svg viewBox="0 0 720 204" role="img" aria-label="{caption}: '
        f'from {min(rates):.3g} to {max(rates):.3g}">\n'
        f'{rows}{columns}{pauses}<polygon class="area" points="{LEFT},{BOTTOM} {line} {RIGHT},{BOTTOM}"/>\n'
        f'<polyline class="line" points="{line}"/>\n</svg>\n</figure>\n'
    )


def _ticks(top: float, most: int) -> list[float]:
    """Return round numbers from 0 to `top`."""
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step * most >= top)
    return [i * step for i in range(most + 1) if i * step <= top]
