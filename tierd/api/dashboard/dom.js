// Elements without HTML text: whatever a name holds, it is shown and never parsed.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Only what changed is touched: a selection stays, and a screen reader is not told again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function toggle(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

// A table whose rows are kept by key from one look to the next.
//
// A column: {id, title, about, number, text(row), title(row), warn(row), sort(row), make(), draw(cell, row),
// head(th)}; `narrow` says from which width on it is shown: "all", "mid" or "wide".
export class Grid {
  constructor(place, caption, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    this.sorted = null;
    this.head = element("tr");
    this.body = element("tbody");
    this.empty = element("p", { class: "muted empty" }, empty);
    this.table = element(
      "table", {}, element("caption", { class: "unseen" }, caption), element("thead", {}, this.head),
      this.body,
    );
    for (const column of columns) this.head.append(this.#header(column));
    place.replaceChildren(this.table, this.empty);
    this.last = [];
  }

  #header(column) {
    const cell = element("th", { scope: "col", class: this.#classes(column) });
    if (column.about) cell.title = column.about;
    if (column.sort) {
      const button = element("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.#sortBy(column));
      cell.append(button);
    } else {
      cell.append(column.title);
    }
    if (column.head) column.head(cell);
    return cell;
  }

  #classes(column) {
    return [column.id, column.number ? "number" : "", column.narrow ?? "all"].join(" ").trim();
  }

  #sortBy(column) {
    const now = this.sorted;
    if (now?.column !== column) this.sorted = { column, down: true };
    else if (now.down) this.sorted = { column, down: false };
    else this.sorted = null;
    [...this.head.children].forEach((cell, at) => {
      const order = this.sorted?.down ? "descending" : "ascending";
      if (this.sorted?.column === this.columns[at]) cell.setAttribute("aria-sort", order);
      else cell.removeAttribute("aria-sort");
    });
    this.show(this.last);
  }

  show(rows) {
    this.last = rows;
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length !== 0;
    const wanted = this.#order(rows);
    const keys = new Set(wanted.map((row) => row.key));
    for (const [key, line] of this.rows) {
      if (!keys.has(key)) {
        line.remove();
        this.rows.delete(key);
      }
    }
    let before = null;
    for (const row of wanted) {
      const line = this.rows.get(row.key) ?? this.#line(row.key);
      this.#draw(line, row);
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== line) this.body.insertBefore(line, next);
      before = line;
    }
  }

  #order(rows) {
    if (!this.sorted) return rows;
    const { column, down } = this.sorted;
    const value = (row) => column.sort(row) ?? -Infinity;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return [...rows].sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)));
  }

  #line(key) {
    const line = element("tr");
    this.columns.forEach((column, at) => {
      const cell = element(at === 0 ? "th" : "td", { class: this.#classes(column) });
      if (at === 0) cell.scope = "row";
      if (column.make) cell.append(column.make());
      line.append(cell);
    });
    this.rows.set(key, line);
    return line;
  }

  #draw(line, row) {
    this.columns.forEach((column, at) => {
      const cell = line.children[at];
      if (column.draw) column.draw(cell, row);
      else setText(cell, column.text(row));
      if (column.hint) set(cell, "title", column.hint(row));
      if (column.warn) toggle(cell, "warn", Boolean(column.warn(row)));
    });
  }
}
