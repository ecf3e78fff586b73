"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const hints = [];  // called with the site under the pointer or the focus, or with the chosen one

  // Marks everything that belongs to a site: "mine" for the chosen one, "near" under the pointer.
  const mark = (kind, site) => {
    for (const one of all(`[data-site].${kind}`)) one.classList.remove(kind);
    if (site >= 0) for (const one of all(`[data-site="${site}"]`)) one.classList.add(kind);
  };

  // ---- the selector of sites ----
  const select = document.getElementById("site");
  let chosen = -1;
  const choose = () => {
    const name = decodeURIComponent((location.hash.match(/^#site=(.*)$/) || ["", ""])[1]);
    const found = [...select.options].find((option) => option.textContent === name);
    select.value = found ? found.value : "";
    chosen = select.value === "" ? -1 : Number(select.value);
    for (const line of all(".answers li")) {
      line.hidden = chosen >= 0 && Number(line.dataset.site) !== chosen;
    }
    mark("mine", chosen);
    for (const hint of hints) hint(chosen);
  };

  // ---- who helps whom ----
  const section = document.querySelector(".helping");
  const names = section ? JSON.parse(section.dataset.names) : [];
  const rounds = section ? JSON.parse(section.dataset.rounds) : [];
  const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;

  const drawing = (card) => {
    const K = names.length;
    const order = JSON.parse(card.dataset.order), seldom = JSON.parse(card.dataset.seldom);
    const place = [];
    order.forEach((site, row) => { place[site] = row; });
    const bytes = Uint8Array.from(atob(card.dataset.frames), (one) => one.charCodeAt(0));
    const largest = Number(card.dataset.largest), top = Number(card.dataset.top);
    const svg = card.querySelector(".matrix svg"), image = svg.querySelector("image");
    const links = card.querySelector(".graph svg"), readout = card.querySelector(".readout");
    const average = image.getAttribute("href");
    const [left, edge, side] = ["x", "y", "width"].map((name) => Number(image.getAttribute(name)));
    const cell = side / K;
    const clear = (row, column) => bytes[row * K + column] > 0;
    const share = (frame, row, column) =>
      (largest * bytes[(frame + 1) * K * K + row * K + column]) / 255;
    let frame = 0, row = -1, column = -1;

    const box = (kind) => {
      const made = document.createElementNS(svg.namespaceURI, "rect");
      made.setAttribute("class", kind);
      svg.append(made);
      return (x, y, width, height) => {
        Object.entries({ x, y, width, height }).forEach(([k, v]) => made.setAttribute(k, v));
      };
    };
    const across = box("band"), down = box("band"), spot = box("spot");

    const light = () => {
      const site = row < 0 ? -1 : order[row];
      if (links) {
        links.classList.toggle("lit", site >= 0);
        for (const link of all(".link", links)) {
          const ends = [Number(link.dataset.to), Number(link.dataset.from)];
          link.classList.toggle("lit", ends.includes(site));
        }
      }
      across(left, edge + row * cell, row < 0 ? 0 : side, row < 0 ? 0 : cell);
      const x = left + column * cell, shown = row >= 0 && column >= 0;
      down(x, edge, shown ? cell : 0, shown ? side : 0);
      spot(x, edge + row * cell, shown ? cell : 0, shown ? cell : 0);
      readout.textContent = say();
    };
    const when = () => {
      if (frame) return `in round ${rounds[frame - 1]}`;
      return seldom[row] ? `in ${seldom[row].join(" of ")} rounds` : "on average";
    };
    const say = () => {
      if (row < 0) return "\u00a0";
      const own = names[order[row]];
      if (column === row) return `${own}: its own model`;
      if (column >= 0) {
        const sure = frame ? "" : clear(row, column) ? "; clear" : "; not shown to be above uniform";
        const part = percent(share(frame, row, column));
        return `${names[order[column]]} helps ${own}: ${part} of its weight on others ${when()}${sure}`;
      }
      const best = order.map((_, j) => [share(frame, row, j), j]).sort((a, b) => b[0] - a[0]);
      const helped = best.slice(0, 3).filter((one) => one[0] > 0);
      const list = helped.map(([part, j]) => `${names[order[j]]} ${percent(part)}`).join(", ");
      return `${own} is helped ${when()} by ${list || "nobody"}`;
    };
    const at = (newRow, newColumn) => {
      [row, column] = [newRow, newColumn];
      mark("near", row < 0 ? -1 : order[row]);
      light();
    };
    const back = () => at(chosen < 0 ? -1 : place[chosen], -1);

    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")}; arrow keys move`);
    svg.addEventListener("pointermove", (event) => {
      const seen = image.getBoundingClientRect();
      const j = Math.floor(((event.clientX - seen.left) / seen.width) * K);
      const i = Math.floor(((event.clientY - seen.top) / seen.height) * K);
      if (i >= 0 && i < K) at(i, j >= 0 && j < K ? j : -1);
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const bound = (value) => Math.min(K - 1, Math.max(0, value));
      at(bound(Math.max(row, 0) + step[0]), bound(Math.max(column, 0) + step[1]));
    });
    svg.addEventListener("focus", () => at(Math.max(row, 0), Math.max(column, 0)));
    for (const part of [svg, links]) if (part) part.addEventListener("pointerleave", back);
    svg.addEventListener("blur", back);
    if (links) {
      links.addEventListener("pointerover", (event) => {
        const node = event.target.closest("[data-site]");
        if (node) at(place[Number(node.dataset.site)], -1);
      });
    }
    hints.push((site) => { [row, column] = [site < 0 ? -1 : place[site], -1]; light(); });

    return (asked) => {
      frame = asked;
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = K;
      const pen = canvas.getContext("2d"), pixels = pen.createImageData(K, K);
      for (let k = 0; k < K * K; k += 1) {
        const ink = bytes[k] ? [0, 114, 178] : [128, 128, 128];
        const part = (largest * bytes[(frame + 1) * K * K + k]) / 255;
        pixels.data.set([...ink, Math.min(255, Math.round((255 * part) / top))], 4 * k);
      }
      pen.putImageData(pixels, 0, 0);
      image.setAttribute("href", frame ? canvas.toDataURL() : average);
      for (const link of links ? all(".link", links) : []) {
        const part = share(frame, place[link.dataset.to], place[link.dataset.from]);
        link.style.opacity = frame ? Math.min(1, part / top) : "";
      }
      light();
    };
  };

  if (section) {
    const draw = all(".help", section).filter((card) => card.dataset.frames).map(drawing);
    const controls = section.querySelector(".rounds");
    const slider = controls.querySelector("input"), button = controls.querySelector("button");
    const told = controls.querySelector("output");
    let timer = null;
    controls.hidden = rounds.length === 0;
    slider.max = rounds.length;
    const show = () => {
      const frame = Number(slider.value);
      told.textContent = frame ? `round ${rounds[frame - 1]}` : "average of all rounds";
      slider.setAttribute("aria-valuetext", told.textContent);
      for (const one of draw) one(frame);
    };
    const stop = () => {
      clearInterval(timer);
      timer = null;
      button.textContent = "Play";
      button.setAttribute("aria-pressed", "false");
    };
    slider.addEventListener("input", () => { stop(); show(); });
    button.addEventListener("click", () => {
      if (timer !== null) { stop(); return; }
      button.textContent = "Stop";
      button.setAttribute("aria-pressed", "true");
      if (Number(slider.value) === rounds.length) slider.value = 0;
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 1;
        show();
        if (Number(slider.value) === rounds.length) stop();
      }, 700);
    });
    slider.setAttribute("aria-valuetext", told.textContent);
  }

  if (select) {
    document.getElementById("choose").hidden = false;
    select.addEventListener("change", () => {
      const name = select.value === "" ? "" : select.selectedOptions[0].textContent;
      location.replace(`#site=${encodeURIComponent(name)}`);
    });
    window.addEventListener("hashchange", choose);
    choose();
  }
})();
