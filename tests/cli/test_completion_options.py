"""`--generation-config` of the commands that sample as the checkpoint advises."""

import argparse
from importlib import import_module

import pytest

from mmvllm.cli import serve
from mmvllm.cli.common import print_sampling_defaults
from mmvllm.cli.main import main
from mmvllm.media.policy import MediaPolicy

OWN = {"temperature": 1e-06, "top_k": 20, "repetition_penalty": 1.05}


def parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    import_module(f"mmvllm.cli.{command}").add_arguments(parser)
    return parser.parse_args([*words], argparse.Namespace(command=command))


@pytest.mark.parametrize(("words", "wanted"), [([], True), (["auto"], True), (["none"], False)])
def test_the_server_is_told_which_defaults_to_use(words, wanted):
    args = parsed("serve", *(["--generation-config", *words] if words else []))
    settings = serve._settings(args, "m", (), MediaPolicy(), {})
    assert settings.uses_generation_config is wanted


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_one_line_says_which_values_are_used(command, capsys):
    print_sampling_defaults(parsed(command), OWN)
    assert capsys.readouterr().err == (
        f"mmvllm {command}: default sampling parameters from the checkpoint's generation_config.json: "
        "temperature 1e-06, top_k 20, repetition_penalty 1.05; --generation-config none ignores them\n"
    )
    print_sampling_defaults(parsed(command), {})
    print_sampling_defaults(parsed(command, "--generation-config", "none"), OWN)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_another_choice_is_refused(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--generation-config", "mine"])
    assert end.value.code == 2 and "invalid choice: 'mine' (choose from auto, none)" in capsys.readouterr().err
