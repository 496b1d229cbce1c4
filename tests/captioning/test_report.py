"""The report shows what the records say, whatever they say, in one page that needs nothing else."""

import base64
import hashlib
import io
import json
import os
import re
import tarfile
import time
import urllib.parse
import urllib.request
import weakref
from array import array
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvllm.captioning import report
from mmvllm.captioning.report import write_report
from mmvllm.captioning.throughput import measure_throughput
from tests.helpers.requests import noise_image

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "</title></style><!-- <script> -->",
    "<!--<script>",
    '"><img src=x onerror="window.hacked = 1">',
    "'; window.hacked = 1; '",
    "{{records}} {{curve}} {{title}} \\g<0> \\1 $1",
    "line\nbreak\r\ttab\0nul",
    "\u2028\u2029\ufeff\u202e&lt;&amp;",
    "caf\udce9.jpg \ud800",
    "javascript:window.hacked=1",
]


def record(path: str | Path, **keys) -> dict:
    return {
        "path": str(path),
        "id": None,
        "digest": "00" * 16,
        "caption": "a caption",
        "error": None,
        "duplicate_of": None,
        "width": 60,
        "height": 40,
        "prompt_tokens": 30,
        "image_tokens": 20,
        "completion_tokens": 5,
        "finish_reason": "eos",
        "seconds": 0.5,
        "time": 1.8e9,
        "model": "model",
        "prompt": "prompt",
        "key": "key",
        "settings": "settings",
    } | keys


class Page(HTMLParser):
    """What a browser would see of a page: elements with their attributes and texts, and the records."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict, list[str]]] = []
        self.comments: list[str] = []
        self._open: list[tuple[str, dict, list[str]]] = []
        self.feed(text)
        self.close()
        blocks = {"records": [], "thumbnails": []}
        for tag, attributes, texts in self.elements:
            if tag == "script" and attributes:
                blocks[attributes["class"]] += json.loads("".join(texts))
        self.records, self.thumbnails = blocks["records"], blocks["thumbnails"]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in ("meta", "link", "input"):
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1][2].append(data)

    def handle_comment(self, data):
        self.comments.append(data)

    def all(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]


def page(path: Path, records, summary=None, **keys) -> Page:
    write_report(path, records, summary or {}, **keys)
    return Page(path.read_bytes().decode())


def pixels(thumbnail: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(thumbnail))))


@pytest.fixture
def colours(tmp_path) -> list[Path]:
    """Twelve images of one colour each, as (20 * i, 0, 255 - 20 * i)."""
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for i, path in enumerate(paths):
        Image.new("RGB", (60, 40), (20 * i, 0, 255 - 20 * i)).save(path)
    return paths


# Words


def test_the_page_says_what_the_records_say(tmp_path, colours):
    records = [
        record(colours[0], id="7"),
        record("gone.png", caption=None, error="no such file", width=None, height=None, seconds=None),
        record(colours[1], duplicate_of=str(colours[0])),
    ]
    shown = page(tmp_path / "report.html", records, {"Model": "a model", "Rate": "9 a second"}, title="My captions")
    for got, want in zip(shown.records, records, strict=True):
        for key in ("path", "id", "caption", "error", "duplicate_of", "width", "prompt_tokens", "seconds", "time"):
            assert got.get(key) == want[key]
    assert shown.all("title") == ["My captions"] and shown.all("h1") == ["My captions"]
    assert (shown.all("th"), shown.all("td")) == (["Model", "Rate"], ["a model", "9 a second"])
    assert "3 images: 2 captioned, 1 failed; 1 duplicate." in "".join(shown.all("p"))


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_record_says_is_never_markup(text, tmp_path):
    harmless = page(tmp_path / "harmless.html", [record("a", caption=None, error="e")], {"label": "text"}, title="t")
    path = tmp_path / "report.html"
    keys = dict.fromkeys(("caption", "error", "duplicate_of", "id", "finish_reason", "model", "prompt"), text)
    shown = page(path, [record(text, **keys)], {text: text}, title=text)

    def outline(of: Page) -> list:
        return [(tag, {k: v for k, v in attributes.items() if k != "content"}) for tag, attributes, _ in of.elements]

    assert outline(shown) == outline(harmless) and shown.comments == []
    displayed = text.encode("utf-8", "backslashreplace").decode()
    assert {shown.records[0][key] for key in ("path", "caption", "error", "duplicate_of", "id")} == {displayed}
    assert shown.all("title") == [displayed]
    scripts = [line for line in path.read_bytes().split(b"\n") if line.startswith(b"<script type")]
    assert not any(mark.encode() in line[1:-9] for line in scripts for mark in "<&\u2028\u2029")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, "12", [1], {}])
def test_what_is_no_number_is_left_out(value, tmp_path):
    shown = page(tmp_path / "report.html", [record("a", width=value, seconds=value, time=value)])
    assert {"width", "seconds", "time"}.isdisjoint(shown.records[0])


def test_keys_may_be_missing(tmp_path):
    shown = page(tmp_path / "report.html", [{}, {"path": "a.png"}, {"path": None, "caption": ["no", "text"]}])
    assert [r["path"] for r in shown.records] == ["", "a.png", ""]
    assert shown.thumbnails == [None] * 3


def test_a_page_without_records_says_so(tmp_path):
    shown = page(tmp_path / "report.html", [])
    assert shown.records == [] and "0 images" in "".join(shown.all("p")) and not shown.all("svg")


def test_only_the_pages_own_script_and_style_may_run_and_nothing_is_fetched(tmp_path):
    shown = page(tmp_path / "report.html", [record("a")])
    (policy,) = [a["content"] for tag, a, _ in shown.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for tag in ("style", "script"):
        (text,) = [text for text in shown.all(tag) if not text.startswith("[")]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    addresses = [a[key] for _, a, _ in shown.elements for key in ("src", "href", "action") if key in a]
    assert addresses == ["data:,"]


# Images


def test_every_record_has_its_own_thumbnail(tmp_path, colours):
    shown = page(tmp_path / "report.html", map(record, colours * 20))
    assert len(shown.thumbnails) == 240
    for i, thumbnail in enumerate(shown.thumbnails):
        level = 20 * (i % 12)
        assert np.abs(pixels(thumbnail).mean((0, 1)) - (level, 0, 255 - level)).max() < 8


@pytest.mark.parametrize("size, want", [((1600, 1200), (160, 120)), ((300, 900), (53, 160)), ((30, 20), (30, 20))])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_thumbnails_are_small(size, want, suffix, tmp_path):
    noise_image(*size).save(tmp_path / f"a.{suffix}")
    (thumbnail,) = page(tmp_path / "report.html", [record(tmp_path / f"a.{suffix}")]).thumbnails
    assert pixels(thumbnail).shape == (*want[::-1], 3)
    assert len(thumbnail) < 8000


def test_thumbnails_are_upright(tmp_path):
    image = Image.new("RGB", (400, 300), "red")
    image.paste("blue", (0, 0, 200, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: what is left comes up
    image.save(tmp_path / "a.jpg", exif=exif)
    (thumbnail,) = page(tmp_path / "report.html", [record(tmp_path / "a.jpg")]).thumbnails
    shown = pixels(thumbnail)
    assert shown.shape == (160, 120, 3)
    assert shown[20, 60, 2] > 200 > 60 > shown[140, 60, 2]


def test_what_cannot_be_read_has_no_thumbnail(tmp_path, colours):
    (tmp_path / "text.png").write_text("Dear Sir or Madam")
    (tmp_path / "empty.png").touch()
    (tmp_path / "half.png").write_bytes(colours[0].read_bytes()[:60])
    os.mkfifo(tmp_path / "pipe.png")
    names = ["text.png", "empty.png", "half.png", "pipe.png", "missing.png", "a" * 5000, "", "nul\0", "list.jsonl:12"]
    shown = page(tmp_path / "report.html", [record(tmp_path / name) for name in names] + [record(colours[3])])
    assert shown.thumbnails[:-1] == [None] * len(names) and shown.thumbnails[-1]


def test_odd_names_have_thumbnails_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [
        "~a.png",
        "data:a.png",
        "a b#c?d%20.png",
        "javascript:1.png",
        os.fsdecode(b"caf\xe9.png"),
        "-.png",
        "x.tar/a.png",
    ]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        noise_image(20, 20).save(name, "PNG")
    shown = page(tmp_path / "report.html", map(record, names))
    assert all(shown.thumbnails)
    for name, card in zip(names, shown.records, strict=True):
        assert card["link"].startswith("./")
        assert os.fsdecode(urllib.parse.unquote_to_bytes(card["link"])) == f"./{name}"
        assert not set(card["link"]) & set(":?#")


def test_links_are_relative_only_below_the_page(tmp_path, colours):
    (tmp_path / "pages").mkdir()
    near, far, gone = (
        page(folder / "report.html", [record(path)]).records[0].get("link")
        for folder, path in (
            (tmp_path, colours[0]),
            (tmp_path / "pages", colours[0]),
            (tmp_path, tmp_path / "gone.png"),
        )
    )
    assert (near, far, gone) == ("./0.png", colours[0].as_uri(), None)


def test_images_on_the_web_are_linked_and_not_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **keys: fetched.append(args))
    urls = ["http://example.com/a.png", "HTTPS://example.com/b.tar/c.png"]
    shown = page(tmp_path / "report.html", map(record, urls))
    assert [card["link"] for card in shown.records] == urls
    assert (fetched, shown.thumbnails) == ([], [None, None])


def test_images_in_tars_have_thumbnails(tmp_path, colours):
    for name in ("one.tar", "two.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            for path in colours:
                tar.add(path, f"in/{path.name}")
    (tmp_path / "two.tar").write_bytes((tmp_path / "two.tar").read_bytes()[: 4 * 1024 + 512])
    shown = page(
        tmp_path / "report.html",
        [record(f"{tmp_path}/{tar}.tar/in/{i}.png") for tar in ("one", "two", "no") for i in (1, 11)],
    )
    assert [thumbnail is not None for thumbnail in shown.thumbnails] == [True, True, True, False, False, False]
    assert pixels(shown.thumbnails[1])[0, 0, 0] > 200 > 60 > pixels(shown.thumbnails[2])[0, 0, 0]
    assert not any("link" in card for card in shown.records)


def test_duplicates_share_the_thumbnail_of_what_they_equal(tmp_path, colours):
    first, second, third = colours[:3]
    records = [
        record(first),
        record(second, duplicate_of=str(first)),
        record(third, duplicate_of="not/in/this/report.png"),
    ]
    shown = page(tmp_path / "report.html", records)
    assert [card.get("same") for card in shown.records] == [None, 0, None]
    assert [thumbnail is not None for thumbnail in shown.thumbnails] == [True, False, True]


# Many


def test_records_are_not_held(tmp_path):
    class Record(dict):
        __hash__ = object.__hash__

    alive, most = weakref.WeakSet(), 0

    def records():
        nonlocal most
        for i in range(20_000):
            alive.add(one := Record(record(f"gone/{i}.png", caption=f"{i} " * 20)))
            most = max(most, len(alive))
            yield one
            del one

    shown = page(tmp_path / "report.html", records())
    assert most <= 4
    assert len(shown.records) == len(shown.thumbnails) == 10_000
    assert "The first 10,000 of 20,000 captioned images are shown." in "".join(shown.all("p"))


def test_the_page_is_written_as_the_records_come(tmp_path):
    sizes = []

    def records():
        for i in range(1000):
            yield record("gone.png", caption=f"{i} " * 1000)
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))

    write_report(tmp_path / "report.html", records(), {})
    written = (tmp_path / "report.html").stat().st_size
    assert sizes[500] > 0.3 * written


def test_captioned_and_failed_images_have_room_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_IMAGES", 5)
    monkeypatch.setattr(report, "MAX_FAILURES", 3)
    bad = [record(f"bad{i}", caption=None, error="bad") for i in range(10)]
    good = [record(f"good{i}") for i in range(20)]
    for records in (bad + good, good + bad, bad[:3] + good[:5]):
        shown = page(tmp_path / "report.html", records)
        names = sorted(card["path"] for card in shown.records)
        assert names == ["bad0", "bad1", "bad2", "good0", "good1", "good2", "good3", "good4"]
        text = "".join(shown.all("p"))
        assert ("The first 5 of 20 captioned images are shown." in text) == (len(records) > 8)
        assert ("The first 3 of 10 failures are shown." in text) == (len(records) > 8)


# Throughput


def seconds(*gaps: tuple[int, float]) -> array:
    """Times of (number, seconds between two)."""
    return array("d", 1.8e9 + np.cumsum(np.concatenate([np.full(*gap) for gap in gaps])))


def test_an_even_rate_is_an_even_curve():
    for per_second in (0.1, 3, 70):
        curve = measure_throughput(seconds((5000, 1 / per_second)))
        assert len(curve.rates) == 120
        assert np.allclose(curve.rates, per_second, rtol=1e-3)


def test_the_curve_follows_the_rate():
    curve = measure_throughput(seconds((1001, 0.1), (1000, 0.4)))
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


def test_short_pauses_are_seen():
    curve = measure_throughput(seconds((600, 1), (1, 500), (600, 1)))
    assert curve.rates.min() < 0.01 and len(curve.pauses) == 0


def test_images_done_together_do_not_make_a_comb():
    batches = array("d", np.repeat(np.arange(40) * 10.0, 32))
    assert np.allclose(measure_throughput(batches).rates, 3.2)


@pytest.mark.parametrize(
    "times", [array("d"), seconds((20, 1)), array("d", [5.0] * 100)], ids=["none", "few", "one moment"]
)
def test_too_little_time_has_no_curve(times):
    assert measure_throughput(times) is None


def test_the_curve_is_drawn_with_its_axes(tmp_path):
    records = [record("gone.png", time=1.8e9 + 3 * i) for i in range(2000)]
    shown = page(tmp_path / "report.html", records)
    assert "Images per second over 100 min, 0.333 on average" in shown.all("figcaption")
    assert shown.all("text") == ["0", "0.1", "0.2", "0.3", "0 min", "20 min", "40 min", "60 min", "80 min"]
    (points,) = [a["points"] for tag, a, _ in shown.elements if tag == "polyline"]
    heights = {float(point.split(",")[1]) for point in points.split()}
    assert len(points.split()) == 122 and max(heights) - min(heights) < 0.2


@pytest.mark.parametrize("length, last", [(30, "30 s"), (119, "100 s"), (900, "15 min"), (40_000, "10 h")])
def test_time_is_told_in_fitting_units(length, last, tmp_path):
    records = [record("gone.png", time=1.8e9 + length * i / 99.9) for i in range(100)] + [
        record("", time=1.8e9 + length)
    ]
    assert page(tmp_path / "report.html", records).all("text")[-1] == last


# Files


def test_a_failure_leaves_no_half_page(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, [], {}, "an earlier report")
    earlier = path.read_text()

    def records():
        yield from (record("gone.png") for _ in range(500))
        raise OSError("the list broke off")

    with pytest.raises(OSError, match="the list broke off"):
        write_report(path, records(), {})
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", earlier)]


def test_a_page_takes_the_place_of_an_earlier_one(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, [], {}, "an earlier report")
    write_report(path, [record("gone.png")], {})
    assert "an earlier report" not in path.read_text() and list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    def records():
        raise AssertionError("read a record")
        yield

    for path, message in ((tmp_path / "no" / "report.html", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=message):
            write_report(path, records(), {})


# In a browser


@contextmanager
def opened(chromium, path: Path, **options):
    """The page in a tab; that it complained, asked for something or fetched anything is an error."""
    context = chromium.new_context(**options)
    tab, complaints = context.new_page(), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    tab.on(
        "request", lambda request: complaints.append(request.url) if request.url[:5] not in ("file:", "data:") else None
    )
    tab.goto(path.as_uri())
    yield tab
    context.close()
    assert complaints == []


WIDTH = "image => image.decode().then(() => image.naturalWidth)"


def widths(tab) -> list[int]:
    """Of the thumbnails, once they are decoded."""
    return [image.evaluate(WIDTH) for image in tab.locator("img").all()]


def shown_names(tab) -> list[str]:
    return tab.locator(".card .name").all_text_contents()


@pytest.fixture
def small_report(tmp_path, colours) -> Path:
    captions = ["A red cat sits", "The Red dog", "a CAFÉ table", "nothing", "long " * 200]
    records = [record(path, caption=caption) for path, caption in zip(colours, captions, strict=False)]
    records += [
        record(tmp_path / "gone.png", caption=None, error="no such file: a red herring"),
        record(colours[6], caption="A red cat sits", duplicate_of=str(colours[0])),
        record("https://example.com/web.png", caption="from the web"),
    ]
    write_report(path := tmp_path / "report.html", records, {"Model": "a model"})
    return path


@pytest.mark.browser
def test_images_are_seen(chromium, small_report):
    with opened(chromium, small_report) as tab:
        assert shown_names(tab) == ["0.png", "1.png", "2.png", "3.png", "4.png", "gone.png", "6.png", "web.png"]
        assert widths(tab) == [60] * 6
        assert tab.locator(".thumbnail").all_text_contents()[-3:] == ["No preview", "", "On the web"]
        assert tab.locator(".card").nth(6).locator(".duplicate").text_content() == "Same image as 0.png"
        first = tab.locator(".card").first
        assert first.locator(".name").get_attribute("title") == str(small_report.parent / "0.png")
        assert "60\u00a0\u00d7\u00a040" in first.locator(".small").text_content()


@pytest.mark.browser
@pytest.mark.parametrize(
    "words, want",
    [
        ("", 8),
        ("red", ["0.png", "1.png", "gone.png", "6.png"]),
        ("RED  Cat", ["0.png", "6.png"]),
        ("cat red 0.png", ["0.png"]),
        ("café", ["2.png"]),
        ("cafe\u0301", ["2.png"]),
        ("no such", ["gone.png"]),
        ("example.com", ["web.png"]),
        ("red zebra", []),
    ],
)
def test_the_search_takes_all_words_in_any_case(words, want, chromium, small_report):
    with opened(chromium, small_report) as tab:
        tab.get_by_label("Search").fill(words)
        assert (len(shown_names(tab)) if words == "" else shown_names(tab)) == want
        number = want if words == "" else len(want)
        assert tab.locator("#matches").text_content() == f"{number} of 8"
        assert tab.locator("#nothing").is_visible() == (number == 0)


@pytest.mark.browser
def test_the_buttons_filter_with_the_keyboard_and_with_the_search(chromium, small_report):
    with opened(chromium, small_report) as tab:
        assert tab.locator(".filters button").all_text_contents() == [
            "All 8",
            "Captioned 7",
            "Failed 1",
            "Duplicates 1",
        ]
        tab.get_by_label("Search").fill("red")
        for keys, want in ((3, ["gone.png"]), (1, ["6.png"])):
            for _ in range(keys):
                tab.keyboard.press("Tab")
            tab.keyboard.press("Enter")
            assert shown_names(tab) == want
        assert tab.locator("[aria-pressed=true]").all_text_contents() == ["Duplicates 1"]


@pytest.mark.browser
def test_a_click_opens_the_image(chromium, small_report):
    with opened(chromium, small_report) as tab:
        links = tab.locator("a.thumbnail")
        assert {link.get_attribute("rel") for link in links.all()} == {"noopener noreferrer"}
        with tab.context.expect_page() as popup:
            links.first.click()
        popup.value.wait_for_load_state()
        assert popup.value.url == (small_report.parent / "0.png").as_uri()
        assert popup.value.evaluate("document.images[0].naturalWidth") == 60


@pytest.mark.browser
def test_a_long_caption_unfolds(chromium, small_report):
    with opened(chromium, small_report) as tab:
        caption, more = tab.locator(".card").nth(4).locator(".caption"), tab.locator(".more")
        folded = caption.bounding_box()["height"]
        more.click()
        assert caption.bounding_box()["height"] > 2 * folded
        assert (more.text_content(), more.get_attribute("aria-expanded")) == ("Show less", "true")


@pytest.mark.browser
def test_hostile_text_is_only_text(chromium, tmp_path):
    records = [record(tmp_path / "no.png", caption=text, id=text) for text in HOSTILE]
    records += [record(text, caption=None, error=text, duplicate_of=text) for text in HOSTILE]
    name = tmp_path / "<img src=x onerror=window.hacked=1>.png"
    noise_image(20, 20).save(name)
    records.append(record(name))
    write_report(tmp_path / "report.html", records, {text: text for text in HOSTILE}, title=HOSTILE[1])
    with opened(chromium, tmp_path / "report.html") as tab:
        assert tab.title() == HOSTILE[1]
        assert tab.evaluate("window.hacked") is None
        shown = tab.locator(".caption").all_text_contents()
        assert shown[: len(HOSTILE)] == [text.encode("utf-8", "backslashreplace").decode() for text in HOSTILE]
        assert shown_names(tab)[-1] == name.name
        assert tab.locator("img").count() == tab.locator("a[href]").count() == 1


@pytest.mark.browser
def test_the_policy_stops_a_script_that_came_in_nonetheless(chromium, tmp_path):
    write_report(path := tmp_path / "report.html", [record("gone.png")], {})
    path.write_text(path.read_text().replace("<header>", "<script>window.hacked = 1</script><header>"))
    context = chromium.new_context()
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert shown_names(tab) == ["gone.png"] and tab.evaluate("window.hacked") is None
    context.close()


@pytest.fixture(scope="module")
def large_report(tmp_path_factory) -> Path:
    """10,000 images with thumbnails of a few KB, made of one noisy image."""
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    thumbnail = report._thumbnail(str(folder / "noise.png"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_thumbnail", lambda source: thumbnail)
        records = (
            record(f"folder/{i}.png", caption=f"number {i} " + "word " * 30, time=1.8e9 + i) for i in range(10_000)
        )
        write_report(folder / "report.html", records, {"Model": "a model"})
    return folder / "report.html"


@pytest.mark.browser
def test_ten_thousand_images_open_fast_and_come_as_one_scrolls(chromium, large_report):
    start = time.perf_counter()
    with opened(chromium, large_report) as tab:
        assert tab.locator("img").first.evaluate(WIDTH) == 120
        assert time.perf_counter() - start < 40
        before = tab.locator(".card").count()
        assert 100 <= before <= 1000
        for _ in range(3):
            tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            tab.locator(".card").nth(before).wait_for(state="attached")
            before = tab.locator(".card").count()
        tab.get_by_label("Search").fill("number 9999")
        assert shown_names(tab) == ["9999.png"]
        assert widths(tab) == [120]


@pytest.mark.browser
def test_all_images_can_be_reached_by_scrolling(chromium, tmp_path):
    write_report(path := tmp_path / "report.html", [record(f"{i}.png") for i in range(1050)], {})
    with opened(chromium, path) as tab:
        deadline = time.monotonic() + 60
        while tab.locator(".card").count() < 1050 and time.monotonic() < deadline:
            tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            tab.wait_for_timeout(50)
        assert shown_names(tab) == [f"{i}.png" for i in range(1050)]


@pytest.mark.browser
@pytest.mark.parametrize("scheme, dark", [("light", False), ("dark", True)])
@pytest.mark.parametrize("width", [320, 375, 768, 1920])
def test_every_width_and_scheme_fits(scheme, dark, width, chromium, tmp_path):
    long = "an-unbroken-name-" * 20
    records = [
        record(f"{long}.png", caption=long, duplicate_of=long, time=1.8e9 + i, error=long if i % 2 else None)
        for i in range(100)
    ]
    write_report(path := tmp_path / "report.html", records, {long: long}, title=long)
    with opened(chromium, path, viewport={"width": width, "height": 800}, color_scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", colour))) < 60) == dark
        tab.evaluate("scrollTo(0, 2000)")
        assert tab.locator(".bar").bounding_box()["y"] == 0


def test_what_is_no_report_is_not_replaced(tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(ValueError, match=r"mine\.html: exists, and is not an earlier report"):
        write_report(tmp_path / "mine.html", [], {})
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    write_report(tmp_path / "report.html", [], {}, "First")
    write_report(tmp_path / "report.html", [], {}, "Second")
    assert "Second" in (tmp_path / "report.html").read_text()
