"use strict";
// The table of all images: sorted, searched, and with rows only where they are in view. Names are set as text, never as
// markup, and nothing is loaded.
(() => {
  const AROUND = 8; // rows above and below the window
  const find = (identity) => document.getElementById(identity);
  const data = JSON.parse(find("photos-data").textContent);
  const box = find("photos-table");
  const view = box.querySelector(".window-of-rows");
  const table = view.querySelector("table");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const search = find("photos-search");
  const linked = find("photos-linked");
  const choices = [...box.querySelectorAll("select")];
  const pictures = new Set(data.pictures);
  const width = data.columns.length;

  // What a cell says, and what its column is sorted by.
  const write = (number) => {
    if (number === null) return "none";
    if (!Number.isInteger(number) && Math.abs(number) < 0.01) return String(Number(number.toPrecision(2))).replace("-", "\u2212");
    const digits = Math.abs(number) < 100 ? 2 : Math.abs(number) < 1000 ? 1 : 0;
    return number.toLocaleString("en-US", { maximumFractionDigits: digits }).replace("-", "\u2212");
  };
  const text = (row, place) => {
    const value = row[place];
    const column = data.columns[place];
    if (column.kind === "verdict") {
      const words = column.verdicts[value][0];
      return row.length > width ? `${words}: ${row[width]}` : words;
    }
    if (column.kind === "number") return place === 0 ? String(value) : row.length > width ? "" : write(value);
    if (value === null) return "";
    return column.kind === "word" ? data.words[value] : value;
  };
  const texts = data.rows.map((row) =>
    data.columns.map((column, place) => (column.kind === "number" && place > 0 ? "" : text(row, place))).join("\n").toLowerCase());
  const { compare } = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  // The numbers of the rows that are wanted, in their order.
  let order = [];
  let sorted = { place: 0, sign: 1 };

  const sort = (rows) => {
    const { place, sign } = sorted;
    const { kind } = data.columns[place];
    const words = kind === "text" || kind === "word";
    const keys = new Map(rows.map((index) => [index, words ? text(data.rows[index], place) : data.rows[index][place]]));
    const isNothing = (key) => key === null || key === "";
    return rows.sort((a, b) => {
      const [first, second] = [keys.get(a), keys.get(b)];
      if (isNothing(first) || isNothing(second)) return isNothing(first) - isNothing(second) || a - b;
      return sign * (words ? compare(first, second) : first - second) || a - b;
    });
  };
  const choose = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = choices.filter((each) => each.value !== "").map((each) => [+each.dataset.column, +each.value]);
    order = sort([...data.rows.keys()].filter((index) =>
      wanted.every((word) => texts[index].includes(word)) &&
      verdicts.every(([place, value]) => data.rows[index][place] === value) &&
      (!linked?.checked || pictures.has(data.rows[index][0]))));
    const [some, all] = [order.length, data.rows.length].map((each) => each.toLocaleString("en-US"));
    find("photos-count").textContent =
      order.length === 0 ? "No image matches." : some === all ? `${all} image${data.rows.length === 1 ? "" : "s"}` : `${some} of ${all} images`;
    heads.forEach((head, place) => {
      if (place === sorted.place) head.setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    table.setAttribute("aria-rowcount", order.length + 1);
    made.forEach((row) => row.remove());
    made.clear();
    view.scrollTop = 0;
    draw();
  };

  // Rows, by their places in the order; two gaps stand for those out of view.
  const made = new Map();
  const [above, below] = [0, 1].map(() => {
    const row = body.insertRow();
    row.className = "gap";
    row.setAttribute("aria-hidden", "true");
    row.insertCell().colSpan = width;
    return row;
  });
  let height = 37;

  const make = (at) => {
    const values = data.rows[order[at]];
    const row = document.createElement("tr");
    row.setAttribute("aria-rowindex", at + 2);
    data.columns.forEach(({ kind, verdicts }, place) => {
      const named = place === 1;
      const cell = row.appendChild(document.createElement(named ? "th" : "td"));
      const words = text(values, place);
      cell.className = named ? "text name" : kind;
      if (named) cell.scope = "row";
      if (kind !== "number") cell.title = words;
      let inside = cell;
      if (named && pictures.has(values[0])) {
        inside = cell.appendChild(document.createElement("a"));
        inside.href = `#picture-${values[0]}`;
      } else if (kind === "verdict") {
        cell.appendChild(document.createElement("span")).className = `dot ${verdicts[values[place]][1]}`;
      }
      inside.append(words);
    });
    return row;
  };
  const draw = () => {
    const first = Math.max(0, Math.floor(view.scrollTop / height) - AROUND);
    const last = Math.min(order.length, Math.ceil((view.scrollTop + view.clientHeight) / height) + AROUND);
    for (const [at, row] of made) {
      if (at < first || at >= last) {
        row.remove();
        made.delete(at);
      }
    }
    let next = below;
    for (let at = last - 1; at >= first; at -= 1) {
      if (!made.has(at)) made.set(at, make(at));
      if (made.get(at).nextSibling !== next) body.insertBefore(made.get(at), next);
      next = made.get(at);
    }
    above.cells[0].style.height = `${first * height}px`;
    below.cells[0].style.height = `${(order.length - last) * height}px`;
  };
  const measure = () => {
    const [row] = made.values();
    if (row) height = row.getBoundingClientRect().height || height;
    draw();
  };

  for (const choice of choices) {
    const place = +choice.dataset.column;
    data.columns[place].verdicts.forEach(([words], value) => {
      const count = data.rows.filter((row) => row[place] === value).length;
      if (count) choice.add(new Option(`${words} (${count.toLocaleString("en-US")})`, value));
    });
    choice.addEventListener("change", choose);
  }
  heads.forEach((head, place) => {
    head.firstElementChild.addEventListener("click", () => {
      sorted = { place, sign: sorted.place === place ? -sorted.sign : 1 };
      choose();
    });
  });
  search.addEventListener("input", choose);
  linked?.addEventListener("change", choose);
  view.addEventListener("scroll", draw, { passive: true });
  window.addEventListener("resize", measure);
  box.hidden = false;
  choose();
  measure();
})();
