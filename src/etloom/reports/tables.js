// Shared by all pages: tables that sort and filter, the theme, and buttons that copy.

function sortTable(table, column, direction) {
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row, i) => {
    const cell = row.cells[column];
    const number = cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);
    return { row, i, empty: cell.dataset.empty !== undefined, number, text: cell.textContent };
  });
  const compare = (a, b) =>
    Number.isNaN(a.number) || Number.isNaN(b.number)
      ? a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number;
  // Absent values stay at the end either way.
  keyed.sort((a, b) => a.empty - b.empty || direction * compare(a, b) || a.i - b.i);
  body.append(...keyed.map(({ row }) => row));
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    cell.querySelector("button").addEventListener("click", () => {
      const now = cell.getAttribute("aria-sort");
      const first = cell.classList.contains("number") ? -1 : 1;
      setSort(table, `${column}.${now ? (now === "ascending" ? -1 : 1) : first}`);
      table.dispatchEvent(new Event("input"));
    });
  });
}

// Sorts a table as a click did, "column.direction"; any other text stands for the order at first.
function setSort(table, text) {
  const [column, direction] = /^\d{1,2}\.-?1$/.test(text) ? text.split(".").map(Number) : [];
  if (table.tHead.rows[0].cells[column]) table.dataset.sort = text;
  else delete table.dataset.sort;
  if (table.dataset.sort) sortTable(table, column, direction);
}

function filterable(input) {
  const table = document.getElementById(input.dataset.table);
  input.addEventListener("input", () => {
    const text = input.value.trim().toLowerCase();
    for (const row of table.tBodies[0].rows) {
      // A name that is made short is whole in its title.
      const texts = [...row.cells].filter((cell) => !cell.querySelector("button")).flatMap((cell) => [cell.textContent, cell.title]);
      row.hidden = !texts.some((content) => content.toLowerCase().includes(text));
    }
  });
}

function themes(redraw) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const apply = (theme) => {
    root.dataset.theme = theme;
    const other = theme === "dark" ? "Light" : "Dark"; // what a click does
    button.textContent = other;
    button.setAttribute("aria-label", `${other} theme`);
    redraw();
  };
  button.addEventListener("click", () => apply(root.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => apply(dark.matches ? "dark" : "light"));
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; apply("light"); });
  window.addEventListener("afterprint", () => apply(before));
  apply(dark.matches ? "dark" : "light");
}

function tables() {
  document.documentElement.classList.add("scripted");
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("input[data-table]").forEach(filterable);
  // A long name is cut to two lines until it is clicked, and one that was made short is shown whole then.
  document.addEventListener("click", (event) => {
    const cell = event.target.closest("td.long");
    if (!cell) return;
    cell.classList.toggle("open");
    if (cell.title) [cell.firstChild.textContent, cell.title] = [cell.title, cell.textContent];
  });
}

// Copies the text that `write` returns at a click of a button, and says so on it.
function copyOnClick(button, write) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = await navigator.clipboard.writeText(write()).then(() => "Copied", () => "Not copied");
    setTimeout(() => { button.textContent = label; }, 2000);
  });
}
