"""Engine options: every field of EngineConfig is an option of every command that makes an engine."""

import argparse
from dataclasses import fields
from importlib import import_module

import pytest

from mmvllm import EngineConfig
from mmvllm.cli.caption import SETTINGS
from mmvllm.cli.common import option_name
from mmvllm.cli.options import add_options, given_options

COMMANDS = [("caption", "x.png"), ("serve",), ("demo",), ("bench", "throughput"), ("bench", "latency")]
VALUES = {
    **{"device": "cpu", "tensor_parallel_size": 2, "dtype": "float32", "load_format": "dummy"},
    **{"max_model_len": 100, "max_num_seqs": 3},
    **{"max_num_batched_tokens": 64, "max_vision_patches": 128, "kvcache_block_size": 32, "num_kvcache_blocks": 10},
    **{"gpu_memory_utilization": 0.5, "cpu_kvcache_bytes": 2**20, "encoder_cache_bytes": 2**19},
    **{"enable_prefix_caching": False, "attention_backend": "torch", "vision_attention_backend": "flash4"},
    **{
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "chat_template": "own.jinja",
        "lora": "adapter",
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
    },
    **{"enforce_eager": True, "async_scheduling": False, "step_timeout": 30.0, "skip_warmup": True, "seed": 7},
}


def words(given: dict) -> list[str]:
    """The command line that gives these engine arguments."""
    line = []
    for name, value in given.items():
        option = option_name(name)
        if isinstance(value, bool):
            line.append(option if value else option.replace("--", "--no-", 1))
        else:
            line += [option, str(value)]
    return line


def parser_of(*command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    import_module(f"mmvllm.cli.{command[0]}").add_arguments(parser)
    return parser


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_field_is_an_option_of_every_command(command):
    assert list(VALUES) == [field.name for field in fields(EngineConfig)]
    args = parser_of(*command).parse_args([*command[1:], *words(VALUES)])
    assert {name: getattr(args, name) for name in VALUES} == VALUES
    assert EngineConfig(**given_options(args, EngineConfig)) == EngineConfig(**VALUES)


@pytest.mark.parametrize("command", [("serve",), ("demo",), ("caption", "x.png")], ids=" ".join)
def test_only_what_is_given_reaches_the_engine(command):
    args = parser_of(*command).parse_args([*command[1:]])
    assert given_options(args, EngineConfig, exclude=SETTINGS) == {}


def test_settings_of_captions_are_no_engine_arguments():
    args = parser_of("caption").parse_args(["x.png", "--seed", "3", "--dtype", "float32", "--max-num-seqs", "2"])
    assert given_options(args, EngineConfig, exclude=SETTINGS) == {"max_num_seqs": 2}


def test_a_selection_of_fields_and_defaults_of_a_command():
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig, ("device", "max_num_seqs", "seed"), ("seed",), max_num_seqs=5)
    assert vars(parser.parse_args([])) == {"device": None, "max_num_seqs": 5}
    assert "(default: 5)" in parser.format_help() and "(default: auto)" in parser.format_help()


def test_help_describes_every_option_and_names_options():
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig)
    for action in parser._actions[1:]:
        assert len(action.help) > 20 and not any(f"{name} " in action.help for name in VALUES if "_" in name)
    text = " ".join(parser.format_help().split())
    assert "number of KV cache blocks; by default as many as --gpu-memory-utilization allows" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--attention-backend", "fast"], "invalid choice: 'fast'"),
        (["--gpu-memory-utilization", "half"], "invalid float value: 'half'"),
    ],
)
def test_a_wrong_value_is_wrong_usage(given, message, capsys):
    with pytest.raises(SystemExit):
        parser_of("serve").parse_args(given)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "least"), [("--max-stored-bytes", 0), ("--max-images", 1)])
def test_a_number_below_the_least_is_refused_with_the_least(option, least, capsys):
    parser = parser_of("serve")
    assert parser.parse_args([option, str(least)])
    with pytest.raises(SystemExit):
        parser.parse_args([option, str(least - 1)])
    assert f"is not a whole number of at least {least}" in capsys.readouterr().err
