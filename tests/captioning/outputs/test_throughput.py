"""The throughput of a job, from the times of its records."""

from array import array

import numpy as np
import pytest

from mmvllm.captioning.outputs.throughput import measure_throughput
from tests.helpers.captioning.reports import page, record


def seconds(*gaps: tuple[int, float]) -> array:
    """Times in seconds, from pairs of a number of images and the seconds between two of them."""
    return array("d", 1.8e9 + np.cumsum(np.concatenate([np.full(*gap) for gap in gaps])))


def test_the_curve_follows_the_rate():
    curve = measure_throughput(seconds((1001, 0.1), (1000, 0.4)))
    assert len(curve.rates) == 120
    assert curve.rates[:20] == pytest.approx(10, rel=1e-3) and curve.rates[30:] == pytest.approx(2.5, rel=1e-3)
    assert curve.bin_s * len(curve.rates) == pytest.approx(500, rel=1e-3)


def test_the_order_of_records_does_not_matter():
    times = seconds((500, 0.1), (500, 0.2))
    mixed = array("d", np.random.default_rng(0).permutation(times))
    assert np.array_equal(measure_throughput(mixed).rates, measure_throughput(times).rates)


def test_long_pauses_are_cut_out():
    curve = measure_throughput(seconds((600, 1), (1, 86400), (600, 1), (1, 601), (799, 1)))
    assert curve.bin_s * len(curve.rates) == pytest.approx(2000)
    assert np.allclose(curve.rates, 1)
    assert curve.pauses == pytest.approx([600, 1201])


def test_short_pauses_lower_the_rate():
    curve = measure_throughput(seconds((600, 1), (1, 500), (600, 1)))
    assert curve.rates.min() < 0.01 and len(curve.pauses) == 0


def test_images_finished_in_batches_give_a_smooth_curve():
    batches = array("d", np.repeat(np.arange(40) * 10.0, 32))
    assert np.allclose(measure_throughput(batches).rates, 3.2)


@pytest.mark.parametrize(
    "times", [array("d"), seconds((20, 1)), array("d", [5.0] * 100)], ids=["none", "few", "one moment"]
)
def test_too_few_times_give_no_curve(times):
    assert measure_throughput(times) is None


def test_the_curve_is_drawn_with_its_axes(tmp_path):
    records = [record("gone.png", time=1.8e9 + 3 * i) for i in range(2000)]
    shown = page(tmp_path / "report.html", records)
    assert shown.all("figcaption") == ["Images per second over 100 min"]
    assert shown.all("text") == ["0", "0.1", "0.2", "0.3", "0 min", "20 min", "40 min", "60 min", "80 min"]
    (points,) = [a["points"] for tag, a, _ in shown.elements if tag == "polyline"]
    heights = {float(point.split(",")[1]) for point in points.split()}
    assert len(points.split()) == 122 and max(heights) - min(heights) < 0.2


@pytest.mark.parametrize("length, last", [(30, "30 s"), (119, "100 s"), (900, "15 min"), (40_000, "10 h")])
def test_the_time_axis_has_a_suitable_unit(length, last, tmp_path):
    records = [record("gone.png", time=1.8e9 + length * i / 99.9) for i in range(100)] + [
        record("", time=1.8e9 + length)
    ]
    assert page(tmp_path / "report.html", records).all("text")[-1] == last
