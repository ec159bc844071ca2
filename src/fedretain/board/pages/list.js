// The list of runs: kept up to date in place, sorted, filtered, and the way to a run or a comparison.
import { STATUSES, address, element, follow, plural, progress, status } from "./follow.js";

const MOST_COMPARED = 100;
const byId = (id) => document.getElementById(id);
const [filter, shown, table, tools] = ["filter", "shown", "table", "tools"].map(byId);
const body = table.tBodies[0];

const percent = (value) => (value === null ? "–" : (100 * value).toFixed(1).replace("-", "−"));

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function ago(then) {
  const seconds = Math.max(Date.now() / 1000 - then, 0);
  if (seconds < 10) return "now";
  if (seconds < 60) return `${10 * Math.floor(seconds / 10)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(1000 * then).toISOString().slice(0, 10);
}

function name(run) {
  const pieces = run.id.split(/(?<=[/,])/).flatMap((piece) => [element("wbr"), piece]);
  const parts = [element("a", { href: address(run.id) }, ...pieces.slice(1))];
  if (run.name && !run.id.split("/").includes(run.name)) parts.push(element("span", { class: "note" }, run.name));
  for (const problem of run.problems) parts.push(element("span", { class: "problem" }, problem));
  if (run.resume) parts.push(element("details", { class: "resume" }, element("summary", {}, "How to go on"), element("code", {}, run.resume)));
  return element("div", { class: "name" }, ...parts);
}

// What a column shows, and what it is sorted by. Down first where the large numbers are the interesting ones.
const COLUMNS = [
  { key: "id", title: "Run", cell: name, by: (run) => run.id },
  { key: "method", title: "Method", cell: (run) => run.method || "–", by: (run) => run.method },
  { key: "loss", title: "Loss", cell: (run) => run.loss || "–", by: (run) => run.loss },
  { key: "data", title: "Data", cell: (run) => run.data || "–", by: (run) => run.data },
  { key: "seed", title: "Seed", cell: (run) => run.seed ?? "–", by: (run) => run.seed, number: true },
  { key: "status", title: "Status", cell: status, by: (run) => STATUSES.indexOf(run.status) },
  { key: "progress", title: "Round", cell: progress, by: (run) => (run.rounds ? run.round / run.rounds : null), down: true },
  { key: "accuracy", title: "Accuracy", unit: "%", cell: (run) => percent(run.accuracy), by: (run) => run.accuracy, number: true, down: true },
  { key: "forgetting", title: "Forgetting", unit: "points", cell: (run) => percent(run.forgetting), by: (run) => run.forgetting, number: true, down: true },
  { key: "seconds", title: "Time", cell: (run) => duration(run.seconds), by: (run) => run.seconds, number: true, down: true },
  { key: "updated", title: "Updated", cell: (run) => element("time", { datetime: new Date(1000 * run.updated).toISOString(), title: new Date(1000 * run.updated).toLocaleString() }, ago(run.updated)), by: (run) => run.updated, number: true, down: true },
];

// ------------------------------------------------------------------ what the reader chose: kept over a reload

const address0 = new URLSearchParams(location.search);
const view = {
  words: address0.get("filter") ?? "",
  status: STATUSES.includes(address0.get("status")) ? address0.get("status") : "",
  sort: COLUMNS.some((column) => column.key === address0.get("sort")) ? address0.get("sort") : "updated",
  down: address0.get("order") !== "up",
};
const chosen = new Set(JSON.parse(sessionStorage.getItem("chosen") ?? "[]"));
let runs = [];

function remember() {
  const kept = new URLSearchParams();
  if (view.words) kept.set("filter", view.words);
  if (view.status) kept.set("status", view.status);
  if (view.sort !== "updated" || !view.down) {
    kept.set("sort", view.sort);
    kept.set("order", view.down ? "down" : "up");
  }
  history.replaceState(null, "", kept.size ? `?${kept}` : location.pathname);
  sessionStorage.setItem("chosen", JSON.stringify([...chosen]));
}

// ------------------------------------------------------------------ drawing

// Every column as text, as it stands in the line; the seed as people write it.
const text = (run) =>
  [run.id, run.name, run.method, run.loss, run.data, `seed=${run.seed}`, run.status, `${run.round}/${run.rounds}`, percent(run.accuracy), percent(run.forgetting), duration(run.seconds), ago(run.updated), ...run.problems]
    .join(" ")
    .toLowerCase();

function matching() {
  const words = view.words.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => {
    const line = words.length ? text(run) : "";
    return words.every((word) => line.includes(word));
  });
}

function sorted(list) {
  const { by } = COLUMNS.find((column) => column.key === view.sort);
  const order = (a, b) => {
    const [x, y] = [by(a), by(b)];
    const [noX, noY] = [x === null || x === "", y === null || y === ""];
    if (noX || noY) return noX - noY; // what was not measured comes last, whichever way
    const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return view.down ? -less : less;
  };
  return [...list].sort((a, b) => order(a, b) || a.id.localeCompare(b.id, "en", { numeric: true }));
}

const rows = new Map();

function makeRow(run) {
  const box = element("input", { type: "checkbox", "aria-label": `Choose ${run.id}` });
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    draw();
  });
  const cells = COLUMNS.map(({ key, title, number }) =>
    element(key === "id" ? "th" : "td", { class: number ? `of-${key} number` : `of-${key}`, "data-title": title, scope: key === "id" ? "row" : null }),
  );
  const row = element("tr", {}, element("td", { class: "choose" }, element("label", {}, box)), ...cells);
  rows.set(run.id, { row, box, cells, drawn: [] });
  return rows.get(run.id);
}

// Cells whose content is the same are left alone, so that an opened "How to go on", a selection and the focus stay.
function fill({ row, box, cells, drawn }, run) {
  box.checked = chosen.has(run.id);
  row.className = run.status;
  COLUMNS.forEach(({ cell }, n) => {
    const made = cell(run);
    const content = made instanceof Node ? made.outerHTML : String(made);
    if (drawn[n] === content) return;
    drawn[n] = content;
    const held = cells[n].contains(document.activeElement);
    cells[n].replaceChildren(made);
    if (held) cells[n].querySelector("a, summary")?.focus({ preventScroll: true });
  });
}

function draw() {
  remember();
  const found = matching();
  const list = sorted(found.filter((run) => !view.status || run.status === view.status));
  const focused = document.activeElement;
  list.forEach((run, n) => {
    const entry = rows.get(run.id) ?? makeRow(run);
    fill(entry, run);
    if (body.rows[n] !== entry.row) body.insertBefore(entry.row, body.rows[n] ?? null);
  });
  while (body.rows.length > list.length) body.lastElementChild.remove();
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  drawHead();
  drawStatuses(found);
  drawActions(list);
  table.hidden = runs.length === 0;
  tools.hidden = runs.length === 0;
  byId("empty").hidden = runs.length > 0;
  const words = runs.length === 0 ? "" : list.length === runs.length ? plural(runs.length, "run") : `${list.length} of ${plural(runs.length, "run")} shown`;
  if (shown.textContent !== words) shown.textContent = words;
}

function drawHead() {
  const head = table.tHead.rows[0];
  if (!head.cells.length) {
    head.append(element("td", { class: "choose" }));
    for (const { key, title, unit, number, down } of COLUMNS) {
      const button = element("button", { type: "button" }, element("span", { class: "title" }, title), unit ? element("span", { class: "unit" }, ` ${unit}`) : null);
      button.addEventListener("click", () => {
        view.down = view.sort === key ? !view.down : Boolean(down);
        view.sort = key;
        draw();
      });
      head.append(element("th", { scope: "col", class: number ? `of-${key} number` : `of-${key}` }, button));
    }
  }
  COLUMNS.forEach(({ key }, n) => {
    head.cells[n + 1].setAttribute("aria-sort", view.sort !== key ? "none" : view.down ? "descending" : "ascending");
  });
}

function drawStatuses(found) {
  const group = byId("statuses");
  if (!group.children.length) {
    for (const one of ["", ...STATUSES]) {
      const button = element("button", { type: "button", class: `chip ${one}` });
      button.addEventListener("click", () => {
        view.status = view.status === one ? "" : one;
        draw();
      });
      group.append(button);
    }
  }
  ["", ...STATUSES].forEach((one, n) => {
    const count = found.filter((run) => !one || run.status === one).length;
    const words = `${one || "all"} ${count}`;
    const button = group.children[n];
    if (button.textContent !== words) button.textContent = words;
    button.setAttribute("aria-pressed", view.status === one);
  });
}

let listed = [];
function drawActions(list) {
  listed = list.map((run) => run.id);
  const there = new Set(runs.map((run) => run.id));
  const picked = [...chosen].filter((id) => there.has(id));
  const set = (id, words, count) => {
    const button = byId(id);
    const tooMany = count > MOST_COMPARED;
    button.textContent = `${words} (${count}${tooMany ? `, at most ${MOST_COMPARED}` : ""})`;
    button.disabled = count === 0 || tooMany;
  };
  set("compare-chosen", picked.length === 1 ? "Open chosen" : "Compare chosen", picked.length);
  set("compare-shown", "Compare all shown", list.length);
  byId("clear").disabled = picked.length === 0;
}

// ------------------------------------------------------------------ what the reader does

function compare(ids) {
  location.assign(ids.length === 1 ? address(ids[0]) : `/compare?${new URLSearchParams(ids.map((id) => ["run", id]))}`);
}

byId("compare-chosen").addEventListener("click", () => {
  const there = new Set(runs.map((run) => run.id));
  compare([...chosen].filter((id) => there.has(id)).sort());
});
byId("compare-shown").addEventListener("click", () => compare([...listed].sort()));
byId("clear").addEventListener("click", () => {
  chosen.clear();
  draw();
  filter.focus();
});
tools.addEventListener("submit", (event) => event.preventDefault());
filter.value = view.words;
filter.addEventListener("input", () => {
  view.words = filter.value.trim();
  draw();
});
document.addEventListener("keydown", (event) => {
  const writing = document.activeElement.matches("input[type=search]");
  if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (event.key === "Escape" && writing) {
    filter.value = view.words = "";
    draw();
    filter.blur();
  }
});

let before = new Map();
function receive(answer) {
  runs = answer.runs;
  byId("waiting").hidden = true;
  byId("folder").textContent = answer.complete ? answer.folder : `${answer.folder} (too many or too deep folders: not all were searched)`;
  byId("start").textContent = `fedretain run experiment.yaml --out ${answer.folder}/first`;
  const there = new Set(runs.map((run) => run.id));
  for (const id of [...rows.keys()]) if (!there.has(id)) rows.delete(id);
  draw();
  const changed = runs.filter((run) => before.has(run.id) && before.get(run.id) !== run.status);
  if (changed.length) byId("said").textContent = changed.map((run) => `${run.id}: ${run.status}`).join("; ");
  before = new Map(runs.map((run) => [run.id, run.status]));
}

setInterval(() => runs.length && !document.hidden && draw(), 10_000); // "20 s ago" goes on when nothing else does
follow("/api/runs", receive, () => {});
