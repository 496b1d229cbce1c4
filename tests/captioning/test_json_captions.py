"""Captions that are JSON of a schema: the object in records, its keys as columns, and what contradicts it."""

import csv
import json
from itertools import islice

import jsonschema
import pytest

from mmvllm import ArgumentError
from mmvllm.captioning import PRESET_SCHEMAS, CaptionSettings, caption_images
from mmvllm.captioning.json_captions import MAX_LEVELS, object_columns, parsed, with_object_columns
from tests.helpers.captioning.command import many, records

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["colour", "count", "share", "tags"],
    "additionalProperties": False,
}
COLUMNS = ["object", "object.colour", "object.count", "object.share", "object.tags"]


@pytest.fixture
def images(tmp_path):
    """Two images, and one that cannot be read."""
    folder = many(tmp_path / "images", 2)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def run(llm, images, **settings) -> list[dict]:
    return list(caption_images(images, llm=llm, **{"schema": SCHEMA, "max_tokens": 200} | settings))


def test_records_have_the_object(llm, images, tmp_path):
    made = run(llm, images, output=tmp_path / "out.jsonl", ordered=True)
    assert records(tmp_path / "out.jsonl") == made and [bool(record["error"]) for record in made] == [
        False,
        False,
        True,
    ]
    for record in made[:2]:
        jsonschema.validate(record["object"], SCHEMA)
        assert json.loads(record["caption"]) == record["object"] and record["finish_reason"] == "eos"
    assert made[2]["object"] is None


def test_each_of_several_captions_has_its_object(llm, images, tmp_path):
    made = run(llm, images, prompts=["One.", "Two."], output=tmp_path / "out.parquet", ordered=True)
    for record in made[:2]:
        assert [one["object"] for one in record["captions"]] == [
            json.loads(one["caption"]) for one in record["captions"]
        ]
        assert record["object"] == record["captions"][0]["object"] is not None
    assert made[2]["object"] is made[2]["captions"][0]["object"] is None
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out.parquet")
    assert {"caption_1", "caption_2", *COLUMNS} <= set(table.column_names)
    assert table["caption_2"].to_pylist()[0] == made[0]["captions"][1]["caption"]
    assert table["object.tags"].to_pylist()[0] == made[0]["object"]["tags"]
    job = caption_images(images, llm=llm, schema=SCHEMA, max_tokens=2, prompts=["One.", "Two."])
    assert len(list(job)) == 3 and job.progress.num_cut == 4


def test_a_caption_that_is_cut_short_is_counted(llm, images):
    job = caption_images(images, llm=llm, schema=SCHEMA, max_tokens=2)
    made = [record for record in job if not record["error"]]
    assert [(record["object"], record["finish_reason"]) for record in made] == [(None, "length")] * 2
    assert job.progress.num_cut == 2


def test_keys_are_columns_of_csv(llm, images, tmp_path):
    made = run(llm, images, output=tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-5:] == COLUMNS
    for row, record in zip(rows, made, strict=True):
        if record["object"] is None:
            assert [row[name] for name in COLUMNS] == [""] * 5
        else:
            assert json.loads(row["object"]) == record["object"] and row["object.colour"] == record["object"]["colour"]
            assert json.loads(row["object.tags"]) == record["object"]["tags"]


def test_keys_are_typed_columns_of_parquet(llm, images, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    made = run(llm, images, output=tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    kinds = [str(table.schema.field(name).type) for name in COLUMNS]
    assert kinds == ["string", "string", "int64", "double", "list<element: string>"]
    for row, record in zip(table.to_pylist(), made, strict=True):
        cells = {name: row[f"object.{name}"] for name in SCHEMA["properties"]}
        assert cells == (record["object"] or dict.fromkeys(SCHEMA["properties"]))


def test_the_same_job_resumes_and_another_schema_is_refused(llm, images, tmp_path):
    made = run(llm, images, output=tmp_path / "out.jsonl", limit=1)
    made += run(llm, images, output=tmp_path / "out.jsonl")
    assert records(tmp_path / "out.jsonl") == made and len(made) == 3
    with pytest.raises(ArgumentError, match=r"schema was '\{"):
        run(llm, images, output=tmp_path / "out.jsonl", schema={"type": "null"})


def test_duplicates_have_the_object_of_their_original(llm, tmp_path):
    folder = many(tmp_path / "images", 1)
    (folder / "copy.png").write_bytes(next(folder.iterdir()).read_bytes())
    first, second = run(llm, folder)
    assert second["duplicate_of"] == first["path"] and first["object"] == second["object"] is not None


@pytest.mark.slow
def test_several_engines_make_the_same_records(checkpoint, images):
    options = {"schema": SCHEMA, "max_tokens": 200, "ordered": True, "model": checkpoint}
    engine = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}
    alone, both = (
        [record["object"] for record in caption_images(images, engine_args=engine, data_parallel_size=n, **options)]
        for n in (1, 2)
    )
    assert alone == both and sum(made is not None for made in alone) == 2


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", PRESET_SCHEMAS)
def test_presets_have_schemas_that_can_be_enforced(llm, images, name):
    job = caption_images(images, llm=llm, schema=PRESET_SCHEMAS[name], max_tokens=900)
    made = next(record for record in job if not record["error"])
    job.close()
    jsonschema.validate(made["object"], PRESET_SCHEMAS[name])


REFUSED = [
    ({"schema": {}}, "schema is an empty schema"),
    ({"schema": {"type": "array", "uniqueItems": True}}, "schema has the keyword 'uniqueItems' at /"),
    ({"schema": SCHEMA, "prefix": "A "}, "prefix puts text around captions, which are JSON with a schema"),
    ({"schema": SCHEMA, "beam_width": 2}, "beam_width cannot be used with a schema, which some presets have"),
    ({"schema": {"type": "string", "pattern": "("}}, "schema: cannot be enforced: regex parse error: unclosed group"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_before_any_image(llm, images, settings, message):
    with pytest.raises(ArgumentError, match=message):
        run(llm, images, **settings)


def test_the_fingerprint_of_settings_without_a_schema_stays():
    assert CaptionSettings().fingerprint == CaptionSettings(schema=None).fingerprint
    assert CaptionSettings().fingerprint != CaptionSettings(schema=SCHEMA).fingerprint


def test_the_command_takes_a_schema_or_a_preset(caption, folder, out, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    done = caption(folder / "000.png", "--output", out, "--schema", tmp_path / "schema.json", "--max-tokens", 2)
    assert done.code == 0 and "cut short 1 (no object" in " ".join(done.err.split())
    done = caption(folder / "000.png", "--output", out, "--overwrite", "--preset", "tags-json", "--max-tokens", 900)
    assert done.code == 0 and "cut short" not in done.err
    [record] = records(out)
    jsonschema.validate(record["object"], PRESET_SCHEMAS["tags-json"])


def test_the_command_names_its_options_in_errors(caption, folder, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "array", "contains": {}}')
    wrong = {
        "--schema has the keyword 'contains' at /": ["--schema", tmp_path / "schema.json"],
        "--schema absent.json cannot be read": ["--schema", "absent.json"],
        "--preset tags-json has its own schema": ["--preset", "tags-json", "--schema", tmp_path / "schema.json"],
    }
    for message, options in wrong.items():
        done = caption(folder, *options)
        assert done.code == 2 and message in done.err


def test_how_deeply_captions_may_be_nested_does_not_depend_on_the_callers():
    def parsed_below(text: str, depth: int):
        return parsed_below(text, depth - 1) if depth else parsed(text)

    for depth in (0, 300):
        assert parsed_below("[" * MAX_LEVELS + "1" + "]" * MAX_LEVELS, depth) is not None
        for text in ("[" * (MAX_LEVELS + 1) + "1" + "]" * (MAX_LEVELS + 1), '{"a":[' * 400 + "1" + "]}" * 400):
            assert parsed_below(text, depth) is None
    assert parsed('[{"a": [1]}, "b", 2.5]') == [{"a": [1]}, "b", 2.5] and parsed("[1") is None


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_caption_with_a_number_that_json_has_not_has_no_object(constant):
    assert parsed(f'{{"a": [{constant}]}}') is None


def test_cells_hold_what_their_columns_can():
    columns = object_columns(json.dumps({"$ref": "#/$defs/a~1b", "$defs": {"a/b": SCHEMA}}))
    assert [*columns] == COLUMNS
    record = {"object": parsed('{"colour": "red", "count": 1' + "0" * 30 + ', "share": 1e999, "tags": ["é"]}')}
    cells = with_object_columns(record, columns)
    assert cells["object.count"] is None and cells["object.share"] > 1e308 and cells["object.tags"] == ["é"]
    assert with_object_columns({"object": [1, None]}, object_columns('{"type":"array"}')) == {"object": "[1, null]"}
    assert parsed('{"a": ') is None and parsed("[" * 100_000) is None
    assert [*islice(object_columns(None), 1)] == []


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"$ref": "#/%24defs/a%20b", "$defs": {"a b": SCHEMA}}, SCHEMA["properties"]),
        ({"$ref": "#/anyOf/0", "anyOf": [SCHEMA]}, SCHEMA["properties"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": True}}, ()),
        *(({"$ref": f"{place}#/b", "b": SCHEMA}, ()) for place in ("https://example.org/a", "a.json", "b")),
        *(
            ({"$ref": reference, "anyOf": [SCHEMA]}, ())
            for reference in ("#/no", "#/", "#/anyOf/1", "#/anyOf/-1", "#/anyOf/x", "#/anyOf/" + "0" * 5000, "x/y", 5)
        ),
        ({"properties": {"a": {"type": {"x": 1}}, "b": {"anyOf": 5}, "c": {"type": [{}]}, "d": 1}}, "abcd"),
        ({"properties": ["a"]}, ()),
        (True, ()),
    ],
)
def test_any_schema_has_columns_as_far_as_it_names_keys(schema, names):
    """Servers that enforce nothing accept any, and an engine many that name the keys in a way of their own."""
    assert [*object_columns(json.dumps(schema))] == ["object", *(f"object.{name}" for name in names)]
