"""Outputs of other versions are resumed if their format and settings are the same, and refused otherwise."""

import json
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.outputs.settings_file import VERSION
from tests.helpers.captioning.pending_tasks import left, record_all

HERE = CaptionSettings(max_tokens=4)
INT8 = CaptionSettings(max_tokens=4, quantization="int8")


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    """An output of images/a.png and images/b.png."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for name in "ab":
        (tmp_path / f"images/{name}.png").touch()
    record_all(HERE, "images", output=tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl"


def change_settings(out: Path, **values) -> None:
    """Change the settings of an output, where None removes one."""
    path = out.with_name("out.jsonl.settings")
    content = json.loads(path.read_text())
    ((name, made_with),) = content["settings"].items()
    content["settings"][name] = {key: value for key, value in (made_with | values).items() if value is not None}
    path.write_text(json.dumps(content))


def test_a_setting_that_an_output_does_not_name_counts_as_its_default(out):
    change_settings(out, quantization=None, n=None)  # as if they had been added after the version that wrote it
    assert left(HERE, "images", output=out) == []
    with pytest.raises(ValueError, match=r"other settings: quantization was None, is 'int8'\. Choose another"):
        Journal(out, INT8)


@pytest.mark.parametrize("version", [1, 2, VERSION + 1, None])
def test_a_settings_file_of_another_format_is_refused(version, out):
    path = out.with_name("out.jsonl.settings")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(ValueError, match=rf"another version of mmvllm \(its format must be {VERSION}, got {version}\)"):
        Journal(out, HERE)
    Journal(out, HERE, overwrite=True).close()


def test_a_setting_of_another_version_is_named_if_it_was_on(out):
    for value in (False, "", True):
        change_settings(out, uppercase=value)
        assert left(HERE, "images", output=out) == []  # the fingerprint says that no setting of this version differs
    with pytest.raises(ValueError, match=r"quantization was None, is 'int8'; .*has no setting uppercase \(was True\)"):
        Journal(out, INT8)
