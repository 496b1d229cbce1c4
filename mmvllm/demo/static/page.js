// Additions to gradio's page: files dropped or pasted anywhere, a photo on phones, enlarged images, frames of videos that
// the browser cannot play, questions as they were typed, keys for editing a question, and names of buttons for screen
// readers.
(() => {
  const nameOf = (url) => decodeURIComponent(url.split("/").pop());
  const isFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const inBox = (event) => event.target instanceof Element && event.target.closest("#box");

  // Drops files into gradio's message box, which reports the files that it does not accept.
  function addFiles(files) {
    const dataTransfer = new DataTransfer();
    for (const file of files) dataTransfer.items.add(file);
    document.querySelector("#box .full-container")?.dispatchEvent(new DragEvent("drop", { dataTransfer }));
  }

  let fading;
  document.addEventListener("dragover", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
    clearTimeout(fading);
    fading = setTimeout(() => document.body.classList.remove("dropping"), 400);
  });
  document.addEventListener("drop", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault(); // the browser would open the file
    if (!inBox(event)) addFiles(event.dataTransfer.files);
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length && !inBox(event)) addFiles(files);
  });

  // Phones open their camera application; computers show the camera's view on the page.
  window.mmvllmTakePhoto = () => {
    if (!matchMedia("(pointer: coarse)").matches) return void document.body.classList.toggle("with-camera");
    const input = Object.assign(document.createElement("input"), { type: "file", accept: "image/*" });
    input.setAttribute("capture", "environment");
    input.addEventListener("change", () => addFiles(input.files));
    input.click();
  };

  function enlarge(image) {
    const dialog = document.createElement("dialog");
    dialog.id = "enlarged";
    dialog.setAttribute("aria-label", nameOf(image.src));
    const close = Object.assign(document.createElement("button"), { type: "button", textContent: "✕" });
    close.setAttribute("aria-label", "Close");
    const large = Object.assign(document.createElement("img"), { src: image.src, alt: nameOf(image.src) });
    dialog.append(close, large);
    dialog.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    if (boxesOf(image.src)) large.after(drawing(document.documentElement, boxesOf(image.src)));
    dialog.showModal(); // Escape closes it, and the focus returns to the image
  }

  // The record of the conversation has boxes and points by image path, in image pixels. An SVG with the image's
  // proportions fits into the image's element like the image itself (object-fit: contain).
  let boxes = {};
  const boxesOf = (src) => Object.entries(boxes).find(([path]) => decodeURIComponent(src).endsWith(path))?.[1];
  const svg = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  function drawing(image, { width, height, boxes }) {
    const pixel = Math.max(width / (image.clientWidth || 128), height / (image.clientHeight || 128)); // per CSS pixel
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "boxes" });
    for (const { box, point, label } of boxes) {
      const [x1, y1, x2, y2] = box ?? [...point, ...point];
      const shape = { x: x1, y: y1, width: x2 - x1, height: y2 - y1 };
      drawn.append(box ? svg("rect", shape) : svg("circle", { cx: x1, cy: y1, r: 4 * pixel }));
      if (!label) continue;
      const text = svg("text", { x: x1 + 3 * pixel, y: y1 + 13 * pixel, "stroke-width": 2.5 * pixel }, label);
      text.style.fontSize = `${11 * pixel}px`;
      drawn.append(text);
    }
    return drawn;
  }
  function draw(image) {
    const found = boxesOf(image.src), known = image.parentElement.querySelector(":scope > .boxes");
    const key = found && JSON.stringify(found);
    if (known?.dataset.key === key) return;
    known?.remove();
    if (!found) return;
    const drawn = drawing(image, found);
    drawn.dataset.key = key;
    image.after(drawn);
  }
  const drawAll = () => document.querySelectorAll("#chat .component button img").forEach(draw);
  window.mmvllmBoxes = (found) => {
    boxes = found;
    drawAll();
  };
  document.addEventListener("click", (event) => {
    const image = event.target.closest?.("#chat .component button:has(img)")?.querySelector("img");
    if (image) enlarge(image);
  });

  // The record of the conversation has a few frames of each video, by its path.
  let strips = {};
  const cannotPlay = (video) => video.error || (video.readyState > 0 && !video.videoWidth); // or it plays only the sound
  const stripOf = (video) => Object.entries(strips).find(([path]) => decodeURIComponent(video.src).endsWith(path))?.[1];
  function showFrames(video) {
    const message = video.closest("[data-testid=user]"), strip = stripOf(video);
    if (!message || !strip || !cannotPlay(video)) return;
    message.classList.add("unplayable");
    message.querySelector(":scope > .strip")?.remove();
    const row = Object.assign(document.createElement("div"), { className: "strip" });
    for (const [seconds, src] of strip) {
      const alt = `Frame of ${nameOf(video.src)} at ${seconds.toFixed(1)} s`;
      row.append(Object.assign(document.createElement("img"), { src, alt }));
    }
    message.append(row);
  }
  function showStills() {
    for (const video of document.querySelectorAll("#gallery video:not([poster])"))
      if (stripOf(video)) video.poster = stripOf(video)[0][1];
  }
  window.mmvllmStrips = (found) => {
    strips = found;
    document.querySelectorAll("#chat video").forEach(showFrames);
    showStills();
  };
  for (const kind of ["error", "loadedmetadata"])
    document.addEventListener(kind, (event) => event.target.matches?.("#chat video") && showFrames(event.target), true);

  document.addEventListener(
    "keydown",
    (event) => {
      if (!event.target.matches?.("#chat textarea") || event.shiftKey) return;
      if (event.isComposing || event.keyCode === 229) return; // an input method handles the key; Safari sets only keyCode
      const label = { Enter: "Submit", Escape: "Cancel" }[event.key];
      if (!label) return;
      event.preventDefault();
      const buttons = event.target.closest(".message-row").nextElementSibling;
      buttons?.querySelector(`button[aria-label="${label}"]`)?.click();
    },
    true,
  );

  // Gradio renders Markdown in questions too; the message's label has the text as it was typed.
  const SAID = "user's message: ";
  function showAsTyped(message) {
    const label = message.getAttribute("aria-label") ?? "";
    const isText = label.startsWith(SAID) && message.querySelector(".message-content");
    let typed = message.querySelector(":scope > .typed");
    if (!isText) return void typed?.remove();
    if (!typed) {
      typed = Object.assign(document.createElement("div"), { className: "typed" });
      message.append(typed);
    }
    const text = label.slice(SAID.length);
    if (typed.textContent !== text) typed.textContent = text;
  }

  const kindOf = (item) => (item?.querySelector("img") ? "picture" : "video");
  const NAMES = {
    "#box textarea": () => "Question",
    "#chat textarea": () => "Edit the question; Enter submits, Escape cancels",
    "#box .delete-button": (button) => `Remove ${kindOf(button.closest(".thumbnail-item"))}`,
    "#box .thumbnail-item": (item) => `The question's ${kindOf(item)}`,
    "#box .upload-button": () => "Add pictures or videos",
    "#box .submit-button": () => "Ask",
    "#box .stop-button": () => "Stop",
    "#chat .component button:has(img)": (button) => `Enlarge ${nameOf(button.querySelector("img").src)}`,
  };
  function name() {
    for (const [selector, nameFor] of Object.entries(NAMES))
      for (const element of document.querySelectorAll(selector)) {
        const label = nameFor(element);
        if (element.getAttribute("aria-label") !== label) element.setAttribute("aria-label", label);
      }
    document.querySelectorAll("#chat .user-row [data-testid=user]").forEach(showAsTyped);
    showStills();
    drawAll();
  }
  const watched = { subtree: true, childList: true, attributeFilter: ["aria-label", "src"] };
  new MutationObserver(name).observe(document.documentElement, watched);
})();
