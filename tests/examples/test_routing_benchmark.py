"""The simulation of the router: affinity and balance with 1 to 64 engines, beside round robin and random choices."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import routing

pytestmark = pytest.mark.thinned

SIZES = (1, 2, 4, 8, 16, 32, 64)


def outcomes(workload: str, num_engines: int) -> dict[str, routing.Outcome]:
    options = routing.parse(["--requests", "40", "--in-flight", "4"])
    return {one.policy: one for one in routing.simulate(workload, num_engines, options)}


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize("num_engines", SIZES)
@pytest.mark.parametrize(("workload", "hits"), [("conversations", "tokens"), ("shared images", "images")])
def test_requests_find_their_caches(workload, hits, num_engines):
    of = outcomes(workload, num_engines)
    of_router, of_others = getattr(of["router"], hits), [getattr(of[name], hits) for name in ("random", "round robin")]
    assert of_router > getattr(of["one cache"], hits) - 0.1
    assert of_router >= max(of_others) + 0.1 * (num_engines > 1)
    assert of["router"].in_flight < 1.8 and of["router"].work < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["captions", "hot image"])
@pytest.mark.parametrize("num_engines", SIZES)
def test_what_has_no_affinity_is_spread_evenly(workload, num_engines):
    of = outcomes(workload, num_engines)
    assert of["router"].in_flight <= of["random"].in_flight
    assert of["router"].work < 1.5
    assert of["router"].tokens > of["one cache"].tokens - 0.05


def test_it_prints_tables_and_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["routing.py", "--engines", "1", "2", "--requests", "12", "--max-imbalance", "2"])
    routing.main()
    *lines, last = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert sum(row[:2] == ["2", "router"] for row in rows) == 4
    printed = json.loads(last)
    assert len(printed["measured"]) == 4 * 2 * 4 and set(printed["microseconds"]) == {"1", "2"}
