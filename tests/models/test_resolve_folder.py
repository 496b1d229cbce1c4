"""A model is named by a folder or a hub id; anything else is refused, and pickled weights are never loaded."""

import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mmvllm import LLM
from mmvllm.models.folder import BUNDLED, resolve_folder, weight_files


class WritesFile:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_not_unpickled(copy_of, tmp_path):
    folder = copy_of("gqa2-tied")
    (folder / "model.safetensors").unlink()
    created = tmp_path / "created"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(WritesFile(created)))
    with pytest.raises(
        ValueError, match=r"no \*\.safetensors weights \(found: .*pytorch_model\.bin.*\); mmvllm loads no"
    ):
        LLM(folder)
    assert not created.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert created.exists()  # unpickling does create the file


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config\.json"):
        LLM(tmp_path)


def test_no_model_means_the_bundled_one_and_a_folder_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_folder(None) == BUNDLED
    assert resolve_folder(tmp_path) == resolve_folder(str(tmp_path)) == tmp_path
    assert resolve_folder("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize("model", ["/no/such/folder", "./absent", "../absent/model", "a b/c", "a/b/c", "x" * 100])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        LLM(model)
    assert str(error.value) == f"model {model!r} is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B'"


@pytest.mark.parametrize("model", ["~no-such-user/model", "x" * 300], ids=["unknown home", "name too long"])
def test_an_impossible_folder_name_is_refused(model):
    with pytest.raises(
        ValueError, match=f"model '{model}' is not a local folder and cannot be downloaded from the hub: "
    ):
        LLM(model)


def test_an_empty_name_means_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config\.json"):
        LLM("")


def test_a_weight_file_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B"):
        LLM(checkpoint / "model.safetensors")


@pytest.fixture
def hub(monkeypatch) -> Iterator[None]:
    """Online, with a client that is made in the test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.mark.parametrize("token", ["hf_hid\x0bden", "hf_hidé", "hf_hid\x7f"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(token, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=r"the token for the hub \(HF_TOKEN, .*\) must be .* ASCII") as refused:
        LLM("tiny/model")
    assert "hid" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("proxy", ["user:hidden@host:port", "http://user:hid/den@127.0.0.1:1"])
def test_errors_of_the_http_library_are_sentences_without_logins(proxy, hub, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ValueError, match=r"tiny/model' is not a local folder and cannot be downloaded") as refused:
        LLM("tiny/model")
    assert "hid" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError, LookupError])
def test_the_login_of_the_hubs_url_is_not_shown(error, hub, monkeypatch, capsys):
    url = "http://user:hidden@127.0.0.1:1/tiny/model"  # from HF_ENDPOINT

    def download(*_):
        logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting %s", url)
        raise error(f"Client error '401 Unauthorized' for url '{url}'")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    stream = io.StringIO()
    for handler in logging.getLogger("huggingface_hub").handlers:
        monkeypatch.setattr(handler, "stream", stream)
    with pytest.raises(ValueError, match="cannot be downloaded from the hub") as refused:
        resolve_folder("tiny/model")
    assert "hidden" not in "".join(traceback.format_exception(refused.value)) + stream.getvalue()
    assert "//***@127.0.0.1:1" in stream.getvalue()


@pytest.mark.spawns
def test_hub_ids_offline(checkpoint, tmp_path):
    """A cached id gives its snapshot folder, another an error. A new process, because the mode is read at import."""
    snapshot = tmp_path / "models--tiny--cached" / "snapshots" / "0123456789"
    shutil.copytree(checkpoint, snapshot)
    (tmp_path / "models--tiny--cached" / "refs").mkdir()
    (tmp_path / "models--tiny--cached" / "refs" / "main").write_text("0123456789")
    code = """
from mmvllm.models.folder import resolve_folder
print(resolve_folder("tiny/cached"))
try:
    resolve_folder("tiny/not-cached")
except ValueError as error:
    print(error)
"""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("\n", 1)
    assert Path(first) == snapshot
    assert rest.startswith("model 'tiny/not-cached' is not a local folder and cannot be downloaded from the hub: ")
    assert "offline" in rest.lower()


def test_names_of_others_are_shown_shortly_and_without_control_characters(tmp_path):
    (tmp_path / "a\x1b[31m").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights") as error:
        weight_files(tmp_path)
    assert "\x1b" not in str(error.value)
    names = {f"t{i}": f"m{i}\x1b]0;PWN\x07\n.safetensors" for i in range(10_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match="lacks m0") as error:
        weight_files(tmp_path)
    assert str(error.value).isprintable() and len(str(error.value)) < 3000
