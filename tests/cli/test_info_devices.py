"""`mmvllm info --tensor-parallel-size`: what each of several devices has of a model."""

import re

import pytest

from mmvllm.cli.main import main
from mmvllm.models.registry import load_config
from mmvllm.models.splitting import PlannedRank
from tests.cli.info_output import sections_of
from tests.helpers.models.device_memory import PUBLISHED, device_bytes, memory_rows
from tests.helpers.models.metadata import ROOT, needs_metadata
from tests.helpers.models.weights import load


@pytest.fixture
def info(checkpoints, capsys):
    """Run `mmvllm info` on a named shape -> {title: {name: value}}."""

    def run(shape: str, *args: str) -> dict[str, dict[str, str]]:
        assert main(["info", "--model", str(checkpoints(shape)), "--device", "cpu", *args]) == 0
        return sections_of(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        (
            "gqa2-tied",
            4,
            {
                "query heads": "1 of 4",
                "key-value heads": "1 of 2, each on 2 devices",
                "MLP": "32 of 128",
                "vocabulary": "192 of 768",
                "ViT": "all of it",
            },
        ),
        (
            "experts16-top8-tied",
            5,
            {
                "query heads": "1 of 5",
                "key-value heads": "1 of 1, each on 5 devices",
                "MLP": "32 of 160",
                "experts": "at most 4 of 16",
                "vocabulary": "at most 154 of 768",
                "ViT": "all of it",
            },
        ),
        (
            "qwen3-mqa-untied",
            3,
            {
                "query heads": "1 of 3",
                "key-value heads": "1 of 1, each on 3 devices",
                "MLP": "at most 43 of 128",
                "vocabulary": "256 of 768",
            },
        ),
    ],
)
def test_what_each_device_has(shape, size, expected, info):
    assert info(shape, "--tensor-parallel-size", str(size))[f"weights of each of {size} devices"] == expected


@pytest.mark.parametrize("shape", ["gqa3-untied", "qwen3-mha-untied"])
def test_memory_of_each_device(shape, info, checkpoints):
    memory = info(shape, "--tensor-parallel-size", "2")["memory of each of 2 devices"]
    parameters = dict(load(checkpoints(shape), ranks=PlannedRank(0, 2)).named_parameters())
    weights, *vision = (float(number) for number in re.findall(r"([\d.]+) MiB", memory["weights"]))
    assert weights == pytest.approx(sum(p.nbytes for p in parameters.values()) / 2**20, abs=0.06)
    of_vit = sum(p.nbytes for name, p in parameters.items() if name.startswith("visual."))
    assert vision == ([pytest.approx(of_vit / 2**20, abs=0.06)] if of_vit else [])
    config = load_config(checkpoints(shape))
    block = 2 * config.num_hidden_layers * 16 * config.num_key_value_heads // 2 * config.head_dim * 4
    assert memory["KV block"] == f"{block / 2**10:.1f} KiB for 16 tokens"


def test_memory_by_dtype_is_that_of_one_process(info):
    alone, split = info("gqa2-tied"), info("gqa2-tied", "--tensor-parallel-size", "2")
    assert not any("weights of each" in title for title in alone) and "memory" in alone
    rows = split["memory needed on cpu by each of 2 processes, by dtype"]
    assert list(rows) == list(alone["memory needed on cpu, by dtype"])


def test_a_size_that_does_not_divide_is_refused(checkpoints, capsys):
    assert main(["info", "--model", str(checkpoints("gqa2-tied")), "--tensor-parallel-size", "3"]) == 2
    heads = "4 attention and 2 key-value heads"
    message = f"--tensor-parallel-size is 3; this model's {heads} can be split over 1, 2 or 4 devices"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_of_published_models():
    """Each device has at least its share; a model that cannot be split over a number of devices has no value there."""
    for name, config in PUBLISHED.items():
        whole, token = device_bytes(config, 1)
        part, part_of_token = device_bytes(config, 4)
        assert whole / 4 < part < whole / 4 + 2 * 2**30, name
        assert part_of_token == token / min(4, config.num_key_value_heads)
    header, rows = memory_rows()
    assert {len(row) for row in rows} == {len(header)} and len(rows) == len(PUBLISHED)
    assert [row[0] for row in rows if "cannot be split" in row] == ["Qwen2-VL-2B", "Qwen2-VL-7B"]


@needs_metadata
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_of_the_table_are_the_published_ones(name):
    folder = ROOT / f"{name}-Instruct"
    if not folder.is_dir():  # the largest: only the number of their parameters is known here
        billions = device_bytes(PUBLISHED[name], 1)[0] / 2e9
        assert billions == pytest.approx({"Qwen2-VL-72B": 73.4, "Qwen3-VL-235B-A22B": 235.7}[name], abs=0.1)
        return
    got, want = PUBLISHED[name], load_config(folder)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for field in (*sizes, "head_dim", "vocab_size", "tie_word_embeddings", "vision", "experts"):
        assert getattr(got, field) == getattr(want, field), field
