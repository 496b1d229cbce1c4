"""Outputs of every earlier format version are resumed; later versions are refused."""

import json
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning import settings as settings_module
from mmvllm.captioning.outputs.journal import Journal
from tests.helpers.captioning.pending_tasks import left, opened, record_all

HERE = CaptionSettings(max_tokens=4)
INT8 = CaptionSettings(max_tokens=4, quantization="int8")
RECORD = (
    '{"path": "images/a.png", "id": null, "digest": "00", "caption": "a", "error": null, "duplicate_of": null, '
    '"width": 40, "height": 40, "prompt_tokens": 9, "image_tokens": 4, "completion_tokens": 4, "finish_reason": '
    '"length", "seconds": 0.1, "time": 1.0, "model": "bundled", "prompt": "Describe this image.", "file": null, '
)
KNOWN = (
    '"model": "bundled", "dtype": "auto", "system": null, "prompt": "Describe this image.", "max_tokens": 4, '
    '"temperature": 0.0, "seed": null, "min_pixels": null, "max_pixels": null, "prefix": "", "suffix": "", '
    '"trigger_word": null'
)
# Version -> the settings of the run, the settings file and the hashes of the record for images/a.png, as written then.
VERSIONS = {
    "without caption_files": (
        HERE,
        f'{{"2cd695ef2797ead8": {{{KNOWN}}}}}',
        '"settings": "2cd695ef2797ead8", "key": "64843865479c66d2ae8e9a9c16a0e8b4"}\n',
    ),
    "with caption_files": (
        HERE,
        f'{{"f024a108de9a0782": {{{KNOWN}, "caption_files": null}}}}',
        '"settings": "f024a108de9a0782", "key": "4783c5852d14664704232f1727cdc9a3"}\n',
    ),
    "with quantization": (
        INT8,
        f'{{"6392cfe0e74846dd": {{{KNOWN}, "caption_files": null, "quantization": "int8"}}}}',
        '"settings": "6392cfe0e74846dd", "key": "811ec5e9dffaf731eb28caa1f64785a1"}\n',
    ),
}


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    """An output in a folder with images/a.png and images/b.png."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for name in "ab":
        (tmp_path / f"images/{name}.png").touch()
    return tmp_path / "out.jsonl"


def write(out: Path, version: str) -> CaptionSettings:
    settings, known, hashes = VERSIONS[version]
    out.write_text(RECORD + hashes)
    out.with_name("out.jsonl.settings").write_text(known)
    return settings


@pytest.mark.parametrize("version", VERSIONS)
def test_an_output_of_an_earlier_version_is_resumed(version, out, tmp_path):
    settings = write(out, version)
    for path in ("images", "./images", tmp_path / "images"):
        (image,) = left(settings, path, output=out)
        assert Path(image).name == "b.png"
    with opened(settings, "images", output=out) as (output, _):
        assert output.index.caption(settings.content_key("00", settings.prompt))["caption"] == "a"
    record_all(settings, "images", output=out)
    assert json.loads(out.with_name("out.jsonl.settings").read_text())["version"] == 2
    for path in ("images", "./images", tmp_path / "images"):
        assert left(settings, path, output=out) == []
    assert out.read_text().startswith(RECORD) and len(out.read_text().splitlines()) == 2


def test_a_failure_of_an_earlier_version_is_tried_again_and_replaced(out, tmp_path):
    write(out, "without caption_files")
    out.write_text(out.read_text().replace('"error": null', '"error": "is damaged"'))
    assert left(HERE, tmp_path / "images", output=out, retry_failed=True) == [str(tmp_path / "images/a.png")]
    record_all(HERE, tmp_path / "images", output=out, retry_failed=True)
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["error"] is None


@pytest.mark.parametrize("version", ["without caption_files", "with caption_files"])
def test_a_setting_that_an_output_does_not_name_counts_as_its_default(version, out):
    write(out, version)
    with pytest.raises(ValueError, match=r"other settings: quantization was None, is 'int8'\. Choose another"):
        Journal(out, INT8)
    with pytest.raises(ValueError, match=r"other settings: prompt was 'Describe this image\.', is 'Count!'\. Choose"):
        Journal(out, CaptionSettings(max_tokens=4, prompt="Count!"))


def test_a_new_setting_with_a_default_changes_no_fingerprint_and_no_output(out, monkeypatch):
    record_all(HERE, "images", output=out)
    named = out.with_name("out.jsonl.settings")
    older = json.loads(named.read_text())
    for values in older["settings"].values():
        del values["quantization"]  # as if it had been added after that version
    named.write_text(json.dumps(older))
    assert left(HERE, "images", output=out) == []
    assert HERE.fingerprint == "f024a108de9a0782" and INT8.fingerprint == "6392cfe0e74846dd"
    defaults = settings_module._DEFAULTS
    assert set(settings_module.FIRST_SETTINGS) < set(defaults)


def test_a_setting_of_another_version_is_refused_unless_it_was_off(out):
    record_all(HERE, "images", output=out)
    named = out.with_name("out.jsonl.settings")
    content = json.loads(named.read_text())
    (values,) = content["settings"].values()
    for value in (None, False, ""):
        values["uppercase"] = value
        named.write_text(json.dumps(content))
        assert left(HERE, "images", output=out) == []
    values["uppercase"] = True
    named.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has no setting uppercase \(was True\)\. Choose another"):
        Journal(out, HERE)


def test_a_settings_file_of_a_later_version_is_refused(out):
    record_all(HERE, "images", output=out)
    named = out.with_name("out.jsonl.settings")
    named.write_text(named.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(
        ValueError, match=r"later version of mmvllm \(format 3, this one reads formats 1 to 2\); update"
    ):
        Journal(out, HERE)
    Journal(out, HERE, overwrite=True).close()


def test_an_output_folder_typed_in_another_way_is_the_same(out, tmp_path, monkeypatch):
    made_with = CaptionSettings(max_tokens=4, caption_files="txt texts")
    options = {"output": out, "format": "txt"}
    record_all(made_with, "images", output_dir=Path("texts"), **options)
    (tmp_path / "texts/a.txt").unlink()
    monkeypatch.chdir(tmp_path / "images")
    for folder in ("../texts", str(tmp_path / "texts")):
        again = CaptionSettings(max_tokens=4, caption_files=f"txt {folder}")
        assert left(again, tmp_path / "images", output_dir=Path(folder), **options) == []
        assert (tmp_path / "texts/a.txt").read_text() == "a a.png\n"
    with pytest.raises(ValueError, match="caption_files was 'txt texts', is 'txt others'"):
        Journal(out, CaptionSettings(max_tokens=4, caption_files="txt others"))
