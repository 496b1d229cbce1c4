"""What engines need of Ray."""

import pytest

from mmvllm.cli.common import option_name
from mmvllm.errors import ArgumentError
from mmvllm.parallel import ray_session

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("engine_args", "number"),
    [
        ({"device": "cpu", "tensor_parallel_size": 2}, 0),
        ({"device": "cuda"}, 1),
        ({"device": "cuda", "tensor_parallel_size": 4}, 4),
    ],
)
def test_an_engine_has_a_gpu_for_each_rank(engine_args, number):
    assert ray_session.gpus_per_engine(engine_args) == number


def test_ray_chooses_the_gpus():
    with pytest.raises(ArgumentError) as raised:
        ray_session.gpus_per_engine({"device": "cuda:1"})
    assert raised.value.format(option_name) == "--device is 'cuda:1', but Ray chooses each engine's GPUs; give 'cuda'"


def test_what_ray_has_too_little_of(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    missing = ray_session.missing_resources
    assert missing(2, "replica", {"CPU": 4, "GPU": 0}) == ["8 CPU requested for 2 replicas, 4 each; Ray has 4"]
    assert missing(1, "actor", {"CPU": 4, "GPU": 2}) == ["2 GPU requested for 1 actor, 2 each; Ray has 0"]
