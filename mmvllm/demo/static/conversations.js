// The list of conversations, which the browser's storage keeps. Gradio runs this script with `element`, `props`,
// `trigger`, `upload` and `watch`; the component's value is the server's record of the conversation.
const KEY = "mmvllm.conversation.", CURRENT = "mmvllm.current";
const MOST = 20, MOST_CHARS = 4_000_000; // of all conversations; browsers allow about 5 million
const MOST_BYTES = 100_000, LONGEST_SIDE = 640; // of an image's copy; larger images are scaled down
const list = element.querySelector("ul");

const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(KEY));
const current = () => sessionStorage.getItem(CURRENT);
function read(id) {
  try {
    return JSON.parse(localStorage.getItem(KEY + id));
  } catch {
    return null;
  }
}
function all() {
  const found = keys().map((key) => ({ id: key.slice(KEY.length), ...read(key.slice(KEY.length)) }));
  return found.filter((one) => one.turns?.length).sort((a, b) => b.saved - a.saved);
}
function forget(id) {
  localStorage.removeItem(KEY + id);
  if (id === current()) sessionStorage.removeItem(CURRENT);
}

const urlOf = (path) =>
  `${window.gradio_config.root}${window.gradio_config.api_prefix ?? "/gradio_api"}/file=${path.split("/").map(encodeURIComponent).join("/")}`;
const dataUrl = (blob) =>
  new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(blob);
  });
async function copyOf(path) {
  const response = await fetch(urlOf(path));
  if (!response.ok) return null;
  const blob = await response.blob();
  if (blob.size <= MOST_BYTES) return dataUrl(blob);
  const image = await createImageBitmap(blob);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

// Stores a conversation. To make room, it deletes the oldest others, then this one's image copies and video frames.
function write(id, conversation) {
  for (const old of all().filter((one) => one.id !== id).slice(MOST - 1)) forget(old.id);
  for (;;) {
    const text = JSON.stringify(conversation);
    const others = all().filter((one) => one.id !== id);
    const size = others.reduce((sum, one) => sum + localStorage.getItem(KEY + one.id).length, text.length);
    try {
      if (size > MOST_CHARS) throw new DOMException("", "QuotaExceededError");
      return localStorage.setItem(KEY + id, text);
    } catch {
      if (others.length) forget(others.at(-1).id);
      else if (conversation.copies) conversation = { ...conversation, copies: undefined, strips: undefined };
      else return;
    }
  }
}

async function save(id, turns, strips) {
  const old = read(id) ?? {};
  const copies = {};
  for (const path of turns.flatMap((turn) => turn.images).filter((path) => !strips[path]))
    copies[path] = old.copies?.[path] ?? (await copyOf(path).catch(() => null));
  const isUnchanged = JSON.stringify(old.turns) === JSON.stringify(turns);
  if (id !== current()) return; // it was deleted meanwhile
  write(id, { saved: isUnchanged ? old.saved : Date.now(), turns, copies, strips });
}

function keep(turns, strips) {
  if (!turns.length) return current() && forget(current());
  if (!current()) sessionStorage.setItem(CURRENT, `${Date.now()}-${Math.random().toString(36).slice(2)}`);
  return save(current(), turns, strips);
}

function open(id) {
  const kept = read(id);
  if (!kept) return;
  sessionStorage.setItem(CURRENT, id);
  trigger("restore", { turns: kept.turns });
}

// Uploads the copies of files that the server has removed. Videos have no copies.
async function sendCopies(missing) {
  const id = current(), kept = read(id);
  if (!kept) return;
  const sent = {};
  for (const path of new Set(missing)) {
    const copy = kept.copies?.[path];
    if (!copy) continue;
    const blob = await (await fetch(copy)).blob();
    const file = new File([blob], fileName(path), { type: blob.type });
    sent[path] = (await upload(file)).path;
    kept.copies[sent[path]] = copy;
  }
  const now = (path) => (missing.includes(path) ? sent[path] : path);
  kept.turns = kept.turns.map((turn) => ({ ...turn, images: turn.images.map(now).filter(Boolean) }));
  if (id !== current()) return;
  write(id, kept);
  const isLost = missing.some((path) => kept.strips?.[path]);
  trigger("restore", { turns: kept.turns, final: true, copies: Object.keys(sent).length > 0, lost: isLost });
}

function download(suffix, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `conversation-${new Date().toISOString().slice(0, 16).replace(/[:T]/g, "-")}.${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const stillOf = ({ copies, strips }, path) => copies?.[path] ?? strips?.[path]?.[0][1];
const fileName = (path) => path.split(/[/\\]/).pop();
function markdown(kept) {
  const { saved, turns } = kept;
  const escaped = (text) => text.replace(/[\\`*_#<>$[\]]/g, "\\$&").replace(/\n/g, "  \n");
  const paths = [...new Set(turns.flatMap((turn) => turn.images))];
  const picture = (path) => (stillOf(kept, path) ? `![${escaped(fileName(path))}][${paths.indexOf(path) + 1}]` : `(${escaped(fileName(path))})`);
  const parts = turns.map((turn) =>
    [turn.images.map(picture).join(" "), `**Question:** ${escaped(turn.question)}`, turn.answer, `*${escaped(turn.note)}*`]
      .filter((part) => part && part !== "**")
      .join("\n\n"),
  );
  const targets = paths.filter((path) => stillOf(kept, path)).map((path) => `[${paths.indexOf(path) + 1}]: ${stillOf(kept, path)}`);
  return [`# ${escaped(props.model)}, ${new Date(saved).toLocaleString()}`, ...parts, targets.join("\n"), ""].join("\n\n");
}
function json({ saved, turns, copies, strips }) {
  const frames = (path) => (strips?.[path] ? { frames: strips[path] } : {}); // [seconds, image] each
  const images = (paths) => paths.map((path) => ({ name: fileName(path), data: copies?.[path] ?? null, ...frames(path) }));
  const named = turns.map((turn) => ({ ...turn, images: images(turn.images) }));
  return JSON.stringify({ model: props.model, time: new Date(saved).toISOString(), turns: named }, null, 2);
}

const ACTIONS = {
  new() {
    sessionStorage.removeItem(CURRENT); // else the empty record would delete it
    trigger("fresh");
  },
  markdown: (kept) => kept && download("md", "text/markdown", markdown(kept)),
  json: (kept) => kept && download("json", "application/json", json(kept)),
  forget() {
    if (!confirm("Delete all conversations that this browser has kept?")) return;
    for (const key of keys()) localStorage.removeItem(key);
    sessionStorage.removeItem(CURRENT);
    trigger("fresh");
  },
};
for (const button of element.querySelectorAll("[data-action]"))
  button.addEventListener("click", async () => {
    await saving;
    ACTIONS[button.dataset.action](current() ? read(current()) : null);
    show();
  });

function row(kept) {
  const { id, saved, turns } = kept;
  const item = document.createElement("li");
  const [title] = turns.map((turn) => turn.question);
  const opens = Object.assign(document.createElement("button"), { type: "button", className: "open" });
  if (id === current()) opens.setAttribute("aria-current", "true");
  opens.addEventListener("click", () => (open(id), show()));
  const copy = turns.flatMap((turn) => turn.images).map((path) => stillOf(kept, path)).find(Boolean);
  if (copy) opens.append(Object.assign(document.createElement("img"), { src: copy, alt: "" }));
  opens.append(Object.assign(document.createElement("span"), { textContent: title }));
  opens.append(Object.assign(document.createElement("time"), { textContent: new Date(saved).toLocaleString() }));
  const deletes = Object.assign(document.createElement("button"), { type: "button", className: "delete", textContent: "✕" });
  deletes.setAttribute("aria-label", `Delete ${title}`);
  deletes.addEventListener("click", () => {
    const wasCurrent = id === current();
    forget(id);
    if (wasCurrent) trigger("fresh");
    show();
  });
  item.append(opens, deletes);
  return item;
}
function show() {
  list.replaceChildren(...all().map(row));
}

let saving = Promise.resolve();
watch("value", () => {
  const { turns, missing, strips, boxes } = JSON.parse(props.value);
  window.mmvllmStrips(strips);
  window.mmvllmBoxes(boxes);
  saving = saving.then(() => (missing.length ? sendCopies(missing) : keep(turns, strips))).then(show, console.warn);
});
window.addEventListener("storage", show); // changes by another tab
window.mmvllmResume = () => current() && open(current());
show();
