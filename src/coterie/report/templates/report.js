"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const select = document.getElementById("site");
  let chosen = -1;

  // Marks everything that belongs to a site: "mine" for the chosen one, "near" under the pointer.
  const mark = (name, site) => {
    for (const one of all(`[data-site].${name}`)) one.classList.remove(name);
    if (site >= 0) for (const one of all(`[data-site="${site}"]`)) one.classList.add(name);
  };

  const choose = () => {
    const name = decodeURIComponent((location.hash.match(/^#site=(.*)$/) || ["", ""])[1]);
    const found = [...select.options].find((option) => option.textContent === name);
    select.value = found ? found.value : "";
    chosen = select.value === "" ? -1 : Number(select.value);
    for (const line of all(".answers li")) {
      line.hidden = chosen >= 0 && Number(line.dataset.site) !== chosen;
    }
    mark("mine", chosen);
  };

  if (select) {
    document.getElementById("choose").hidden = false;
    select.addEventListener("change", () => {
      const name = select.value === "" ? "" : select.selectedOptions[0].textContent;
      location.replace(`#site=${encodeURIComponent(name)}`);
    });
    window.addEventListener("hashchange", choose);
    choose();
  }
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const near = event.target.closest && event.target.closest("svg [data-site]");
      mark("near", near ? near.dataset.site : -1);
    });
  }
})();
