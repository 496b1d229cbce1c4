"use strict";
{
  const STEP = 200;  // cards made at a time
  const LONG = 320;  // characters beyond which a caption is folded

  const records = [...document.querySelectorAll("script.records")].flatMap((block) => JSON.parse(block.textContent));
  const thumbnailBlocks = [...document.querySelectorAll("script.thumbnails")];
  const blockSize = Number(thumbnailBlocks[0]?.dataset.size);
  const parsed = new Map();
  const fold = (text) => text.normalize("NFC").toLowerCase();
  const edits = new Map();  // index of a record -> its changed caption
  const haystack = (index) => fold([records[index].path, text(index), ...(records[index].more ?? []), records[index].error].filter(Boolean).join("\n"));
  const text = (index) => edits.get(index) ?? records[index].caption ?? "";
  const kinds = {
    all: () => true,
    captioned: (r) => r.error === undefined,
    failed: (r) => r.error !== undefined,
    duplicates: (r) => r.duplicate_of !== undefined,
  };

  const haystacks = records.map((_, index) => haystack(index));
  const collator = new Intl.Collator(undefined, {numeric: true});
  const byNumber = (a, b) => b - a;
  // Order -> the value that records are compared by, and the comparison.
  const orders = {
    found: [(index) => index, (a, b) => a - b],
    name: [(index) => baseName(records[index].path), collator.compare],
    time: [(index) => records[index].time ?? -1, byNumber],
    length: [(index) => [...text(index)].length, byNumber],
    tokens: [(index) => records[index].completion_tokens ?? -1, byNumber],
    failed: [(index) => Number(records[index].error !== undefined), byNumber],
    edited: [(index) => Number(edits.has(index)), byNumber],
  };

  const search = document.getElementById("search");
  const cards = document.getElementById("cards");
  const sort = document.getElementById("sort");
  const reverse = document.getElementById("reverse");
  const end = document.getElementById("end");
  const buttons = [...document.querySelectorAll(".filters button")];
  const number = new Intl.NumberFormat(undefined, {maximumSignificantDigits: 3});
  const count = new Intl.NumberFormat();
  const date = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "short"});
  let matches = [];
  let kind = "all";
  let isDownloaded = true;

  // Thumbnails are most of the page: a block of them is parsed when its first image is shown.
  const thumbnail = (index) => {
    const block = Math.floor(index / blockSize);
    if (!parsed.has(block)) parsed.set(block, JSON.parse(thumbnailBlocks[block].textContent));
    return parsed.get(block)[index % blockSize];
  };

  // Texts of records are set as text or as values of harmless attributes, never as markup.
  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const baseName = (path) => path.split("/").pop() || path;
  const isClip = (record) => record.start !== undefined;

  // Seconds as 1:05 or 1:02:05.5.
  const clock = (seconds) => {
    const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
    const rest = (Math.round(seconds % 60 * 10) / 10).toString().padStart(seconds % 1 ? 4 : 2, "0");
    return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
  };
  const range = (r) => `${clock(r.start)}–${r.end === undefined ? "end" : clock(r.end)}`;
  const isPart = (r) => isClip(r) && r.end !== undefined && (r.start > 0 || r.end !== r.duration);

  const preview = (record, index) => {
    const box = make(record.link ? "a" : "div", "thumbnail");
    if (record.link) {
      box.href = record.link;
      box.target = "_blank";
      box.rel = "noopener noreferrer";
      box.setAttribute("aria-label", `Open ${baseName(record.path)}`);
    }
    if (record.link && isPart(record)) box.href += `#t=${record.start},${record.end}`;  // the range that players show
    const data = thumbnail(record.same ?? index);
    if (!data) {
      box.textContent = record.web ? "On the web" : "No preview";
      return box;
    }
    const image = make("img", "");
    image.loading = "lazy";
    image.decoding = "async";
    image.alt = `${isClip(record) ? "Frames" : "Thumbnail"} of ${baseName(record.path)}`;
    image.src = `data:image/webp;base64,${data}`;
    box.append(record.boxes ? drawn(image, record.boxes) : image);
    return box;
  };

  // An image with boxes and points drawn over it, at positions in percent.
  const drawn = (image, boxes) => {
    const frame = make("span", "drawn");
    frame.append(image, ...boxes.map(([left, top, width, height, label]) => {
      const mark = make("span", width || height ? "box" : "box point");
      Object.assign(mark.style, {left: `${left}%`, top: `${top}%`, width: `${width}%`, height: `${height}%`});
      if (label) mark.append(make("span", "label", label));
      return mark;
    }));
    return frame;
  };

  const button = (name, label, act) => {
    const element = make("button", "", name);
    element.type = "button";
    element.setAttribute("aria-label", label);
    element.addEventListener("click", act);
    return element;
  };

  const caption = (words) => {
    const paragraph = make("p", "caption", words);
    paragraph.dir = "auto";
    if (words.length <= LONG) return [paragraph];
    paragraph.classList.add("clamped");
    const more = make("button", "more", "Show all");
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => {
      const folded = paragraph.classList.toggle("clamped");
      more.textContent = folded ? "Show all" : "Show less";
      more.setAttribute("aria-expanded", String(!folded));
    });
    return [paragraph, more];
  };

  const change = (index, words) => {
    const isOriginal = words === records[index].caption.replace(/\r\n?/g, "\n");  // a text area normalizes line breaks
    if (isOriginal) edits.delete(index);
    else edits.set(index, words);
    haystacks[index] = haystack(index);
    isDownloaded = edits.size === 0;
    document.getElementById("edits").textContent = edits.size ? `${count.format(edits.size)} edited` : "";
  };

  // A card's caption and the buttons to edit it. Input takes effect at once; Escape discards it.
  const editable = (index, item) => {
    const box = make("div", "text"), acts = make("div", "acts"), name = baseName(records[index].path);
    const show = () => {
      box.replaceChildren(...caption(text(index)));
      acts.replaceChildren(button("Edit", `Edit the caption of ${name}`, edit));
      item.classList.toggle("edited", edits.has(index));
      if (!edits.has(index)) return;
      const restore = () => finish(records[index].caption.replace(/\r\n?/g, "\n"));
      acts.prepend(make("span", "small", "Edited"), button("Restore", `Restore the caption of ${name}`, restore));
    };
    const finish = (words) => {
      change(index, words);
      show();
      acts.lastElementChild.focus();
    };
    const edit = () => {
      const before = text(index).replace(/\r\n?/g, "\n"), area = make("textarea", "");
      area.value = before;
      area.dir = "auto";
      area.setAttribute("aria-label", `Caption of ${name}`);
      area.addEventListener("input", () => change(index, area.value));
      area.addEventListener("keydown", (event) => {
        if (event.isComposing) return;
        if (event.key === "Escape") finish(before);
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) finish(area.value);
      });
      box.replaceChildren(area);
      acts.replaceChildren(
        button("Cancel", `Discard the changes of ${name}`, () => finish(before)),
        button("Done", `Finish the caption of ${name}`, () => finish(area.value)));
      area.focus();
    };
    show();
    return [box, acts];
  };

  // Downloads the records of the output; records with an edited caption are marked.
  const download = () => {
    const lines = [...document.querySelectorAll("script.lines")].flatMap((block) => JSON.parse(block.textContent));
    const changed = (line, caption) => {
      const record = {...JSON.parse(line), caption, edited: true};
      if (record.captions?.length) record.captions[0].caption = caption;
      return JSON.stringify(record);
    };
    const parts = lines.map((line, index) => `${edits.has(index) ? changed(line, edits.get(index)) : line}\n`);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, {type: "application/jsonl"}));
    link.download = "captions-edited.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    isDownloaded = true;
  };

  // Lines break only after a dot.
  const smallPrint = (r) => [
    isPart(r) && r.duration !== undefined && `of ${clock(r.duration)}`,
    r.num_frames && `${count.format(r.num_frames)} frame${r.num_frames === 1 ? "" : "s"}`,
    r.width && r.height && `${r.width} × ${r.height}`,
    r.seconds !== undefined && `${number.format(r.seconds)} s in the engine`,
    r.prompt_tokens && `${count.format(r.prompt_tokens)} tokens in, ${count.format(r.completion_tokens ?? 0)} out`,
    r.finish_reason === "length" && "cut off at the token limit",
    r.finish_reason === "repetition" && "ended where it repeated itself",
    r.time !== undefined && Math.abs(r.time) < 8e12 && date.format(new Date(r.time * 1000)),
    r.id !== undefined && `id ${r.id}`,
  ].filter(Boolean).map((part) => part.replaceAll(" ", "\u00a0")).join("\u00a0· ");

  const card = (index) => {
    const record = records[index];
    const item = make("li", isClip(record) ? "card clip" : "card");
    const words = make("div", "words");
    const name = make("p", "name", [baseName(record.path), isClip(record) && (record.start || record.end) && range(record)].filter(Boolean).join(" "));
    name.title = record.path;
    name.dir = "auto";
    words.append(name);
    if (record.error !== undefined) words.append(make("p", "error", `Failed: ${record.error}`));
    const foot = make("div", "foot");
    foot.append(make("p", "small", smallPrint(record)));
    if (record.caption !== undefined) {
      const [box, acts] = editable(index, item);
      words.append(box);
      foot.append(acts);
    }
    for (const each of record.more ?? []) words.append(...caption(each));
    if (record.duplicate_of !== undefined) {
      const duplicate = make("p", "duplicate", `Same ${isClip(record) ? "clip" : "image"} as ${baseName(record.duplicate_of)}`);
      duplicate.title = record.duplicate_of;
      words.append(duplicate);
    }
    words.append(foot);
    item.append(preview(record, index), words);
    return item;
  };

  const extend = () => {
    const from = cards.childElementCount;
    cards.append(...matches.slice(from, from + STEP).map(card));
    observer.unobserve(end);  // observing again reports an end that is still in view
    if (cards.childElementCount < matches.length) observer.observe(end);
  };

  const observer = new IntersectionObserver(
    (entries) => { if (entries.some((entry) => entry.isIntersecting)) extend(); }, {rootMargin: "1500px"});

  const update = () => {
    const words = fold(search.value).split(/\s+/).filter(Boolean);
    const isShown = (i) => kinds[kind](records[i]) && words.every((word) => haystacks[i].includes(word));
    const [value, compare] = orders[sort.value];
    const found = [...haystacks.keys()].filter(isShown).map((index) => ({index, value: value(index)}));
    matches = found.sort((a, b) => compare(a.value, b.value)).map(({index}) => index);
    if (reverse.getAttribute("aria-pressed") === "true") matches.reverse();
    document.getElementById("matches").textContent =
      `${count.format(matches.length)} of ${count.format(records.length)}`;
    document.getElementById("nothing").hidden = matches.length > 0;
    cards.replaceChildren();
    extend();
  };

  for (const button of buttons) {
    button.textContent += ` ${count.format(records.filter(kinds[button.dataset.kind]).length)}`;
    button.addEventListener("click", () => {
      kind = button.dataset.kind;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      update();
    });
  }
  search.addEventListener("input", update);
  sort.addEventListener("change", update);
  reverse.addEventListener("click", () => {
    reverse.setAttribute("aria-pressed", String(reverse.getAttribute("aria-pressed") === "false"));
    update();
  });
  document.getElementById("download").addEventListener("click", download);
  window.addEventListener("beforeunload", (event) => { if (!isDownloaded) event.preventDefault(); });
  update();
}
